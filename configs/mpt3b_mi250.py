# MPT-3B (2.65B parameters) on 4 x MI250: 8 devices of 64 GB, no recomputation.
# Tokens: 512 sequences x 2048 = 1,048,576 per step; x 51,500 steps = 54.0B, 20.4 per parameter.
# Batch: 512 = 8 devices x microbatch 4 x 16 accumulation steps.
# Memory, computed, not measured on AMD hardware: 12 / 8 + 4 bytes per parameter = 14.6 GB,
#   activations 32 bytes x 8192 tokens x 2560 x 32 = 21.5 GB, at the peak 42.8 GB
#   (python -m planning.memory configs/mpt3b_mi250.py --ranks=8).
# Cost, by plan.py, not measured: 10 to 18 days, at 60,300 to 33,800 tokens/s in all.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt3b_mi250.py
d_model = 2560
n_heads = 20
n_layers = 32
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 512
microbatch_size = 4
max_steps = 51500
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1.6e-4
decoupled_weight_decay = 0.0
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py, and fits
save_interval = 100
run_dir = "runs/mpt3b_mi250"
