# MPT-3B (2.65B parameters): LLM Foundry's recipe, with learned positions and biases.
# Tokens: 512 sequences x 2048 = 1,048,576 per step; x 51,500 steps = 54.0B, 20.4 per parameter.
# Batch: 512 = 8 devices x microbatch 8 x 8 accumulation steps.
# Cost: 7 days on 8 x A100 80GB, at the 10,811 tokens/s each (best of LLM Foundry's rows).
# Reaches: published for MPT-3B, a zero-shot mean of 0.578 (evaluation/figures.py).
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt3b.py
d_model = 2560
n_heads = 20
n_layers = 32
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 512
microbatch_size = 8
max_steps = 51500
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1.6e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py, and fits: 29 % of 80 GB
activation_checkpointing = "full"
save_interval = 500
run_dir = "runs/mpt3b"
