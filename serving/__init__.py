"""Text from a trained model: sampling, the decoder, the engine that batches texts, its speed."""
