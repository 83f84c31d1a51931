# The demo: a real MPT learns Python's standard library on a laptop CPU in about two minutes.
# A step: 8 sequences x 128 = 1,024 tokens; x 900 steps = 0.9M tokens.
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
max_steps = 900
lr = 2e-3
warmup_steps = 50
eval_interval = 300
save_interval = 300
resume = "again"  # run twice: goes on if it was interrupted, else starts anew
peak_tflops = "measure"
run_dir = "runs/demo"
