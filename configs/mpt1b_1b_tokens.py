# MPT-1B (1.32B parameters) for 1B tokens, as in MosaicML's posts: a short run to compare machines.
# Tokens: 512 sequences x 2048 = 1,048,576 per step; x 1,000 steps = 1.05B, 0.80 per parameter.
# Batch: 512 = 8 devices x microbatch 4 x 16 accumulation steps.
# Cost: 1.8 hours on 8 x A100 80GB, at the 20,513 tokens/s each (best of LLM Foundry's rows).
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt1b_1b_tokens.py
d_model = 2048
n_heads = 16
n_layers = 24
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 512
microbatch_size = 4
max_steps = 1000
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 2e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py, and fits: 28 % of 80 GB
activation_checkpointing = "none"
eval_interval = 100
save_interval = 250
run_dir = "runs/mpt1b_1b_tokens"
