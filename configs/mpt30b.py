# MPT-30B (29.98B parameters; 480 GB of weights, gradients and Adam): LLM Foundry's recipe.
# Tokens: 2048 sequences x 2048 = 4,194,304 per step; x 143,100 steps = 600.2B, 20.0 per parameter.
# Batch: 2048 = 32 devices x microbatch 8 x 8 accumulation steps.
# C4's English part has about 156B tokens (Dodge et al., 2021): seen about 3.8 times.
# Cost: 948 days on 8 x A100 80GB, at the 916 tokens/s each (best of LLM Foundry's rows).
# Launch on each of 4 nodes: torchrun --nnodes 4 --nproc_per_node 8 --rdzv_backend c10d \
#   --rdzv_endpoint HEAD_NODE:29500 fsdp_train.py configs/mpt30b.py
d_model = 7168
n_heads = 56
n_layers = 48
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 2048
microbatch_size = 8
max_steps = 143100
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "full"
save_interval = 250
run_dir = "runs/mpt30b"
