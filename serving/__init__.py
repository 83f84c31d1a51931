"""Text from a trained model: sampling, the decoder, the stream of text, its speed."""
