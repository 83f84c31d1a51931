# MPT-1B (1.32B parameters) on 4 x MI250: 8 devices of 64 GB.
# Tokens: 512 sequences x 2048 = 1,048,576 per step; x 24,800 steps = 26.0B, 19.8 per parameter.
# Batch: 512 = 8 devices x microbatch 8 x 8 accumulation steps.
# Memory, computed, not measured on AMD hardware: 12 / 8 + 4 bytes per parameter = 7.2 GB,
#   activations 32 bytes x 16384 tokens x 2048 x 24 = 25.8 GB, at the peak 36.9 GB
#   (python -m planning.memory configs/mpt1b_mi250.py --ranks=8).
# Cost, by plan.py, not measured: 2.5 to 4.5 days, at 119,000 to 66,400 tokens/s in all.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt1b_mi250.py
d_model = 2048
n_heads = 16
n_layers = 24
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 512
microbatch_size = 8
max_steps = 24800
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 2e-4
decoupled_weight_decay = 0.0
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py, and fits
save_interval = 500
run_dir = "runs/mpt1b_mi250"
