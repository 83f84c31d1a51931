# TinyStories from the Hugging Face Hub: simple English after an evening on a laptop, 6 hours at
# 4,500 tokens/s. The model has 12.2M parameters.
# Tokens: 32 sequences x 256 = 8,192 per step; x 12,000 steps = 98M, 8 per parameter.
# Batch: 32 = 2 ranks x microbatch 8 x 2 accumulation steps.
# Launch: torchrun --nproc_per_node 2 fsdp_train.py configs/stories.py
d_model = 384
n_heads = 6
n_layers = 6
max_seq_len = 256
vocab_size = 4096
alibi = True
no_bias = True
dataset = "roneneldan/TinyStories"
tokenizer = "bpe-4096"
max_tokens = 100_000_000
global_batch_size = 32
microbatch_size = 8
max_steps = 12000
lr = 1e-3
warmup_steps = 200
eval_interval = 500
eval_tokens = 200_000
save_interval = 500
peak_tflops = "measure"
run_dir = "runs/stories"
