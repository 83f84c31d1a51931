# The demo: a real MPT learns Python's standard library, on a laptop CPU in about two minutes.
# Reaches: a validation loss of 4.7 nats per token, from 9.3; measured in bench/results/cpu.md.
# Tokens: 8 sequences x 128 = 1,024 per step; x 700 steps = 0.7M.
# Batch: 8 = 2 ranks x microbatch 4 x 1 accumulation step.
# Launch: torchrun --nproc_per_node 2 fsdp_train.py configs/demo.py
d_model = 256
n_heads = 8
n_layers = 4
max_seq_len = 128
vocab_size = 4096
alibi = True
no_bias = True
dataset = "stdlib"
tokenizer = "bpe-4096"
val_fraction = 0.02
global_batch_size = 8
microbatch_size = 4
max_steps = 700
lr = 2e-3
warmup_steps = 50
eval_interval = 175
save_interval = 175
peak_tflops = "measure"
expect = "validation loss 4.3 to 4.9 nats per token, 1.8 to 2.1 bits per byte, after 700 steps"
run_dir = "runs/demo"
