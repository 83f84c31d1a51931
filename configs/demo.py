# The demo: a real MPT learns Python's standard library on a laptop CPU in about two minutes.
# A step: 8 sequences x 128 = 1,024 tokens; x 700 steps = 0.7M tokens.
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
resume = "again"  # run twice: goes on if it was interrupted, else starts anew
peak_tflops = "measure"
expect = "after 700 steps of stdlib a validation loss of 4.3 to 4.9 nats a token, 1.8 to 2.1 bits per byte"
run_dir = "runs/demo"
