"""The fast versions of attention and the loss: Triton kernels, FlexAttention, blocks on a CPU."""
