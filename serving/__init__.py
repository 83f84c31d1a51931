"""Text from a trained model: how a token is drawn, the decoder, the stream of text."""
