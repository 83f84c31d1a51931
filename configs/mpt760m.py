# MPT-760M (760M parameters): LLM Foundry's recipe, with learned positions and biases.
# Tokens: 256 sequences x 2048 = 524,288 per step; x 29,000 steps = 15.2B, 20.0 per parameter.
# Batch: 256 = 8 devices x microbatch 4 x 8 accumulation steps.
# Cost: 16 hours on 8 x A100 80GB, at the 32,434 tokens/s each (best of LLM Foundry's rows).
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt760m.py
d_model = 1536
n_heads = 12
n_layers = 24
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 256
microbatch_size = 4
max_steps = 29000
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 2.5e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py, and fits: 19 % of 80 GB
activation_checkpointing = "none"
save_interval = 500
run_dir = "runs/mpt760m"
