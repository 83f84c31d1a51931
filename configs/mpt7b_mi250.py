# MPT-7B (6.66B parameters) on 4 x MI250: 8 devices of 64 GB. Batch as in MosaicML's posts.
# Tokens: 1536 sequences x 2048 = 3,145,728 per step; x 42,600 steps = 134.0B, 20.1 per parameter.
# Batch: 1536 = 8 devices x microbatch 3 x 64 accumulation steps.
# Memory, computed, not measured on AMD hardware: 16 bytes per parameter / 8 = 13.3 GB,
#   activations 32 bytes x 6144 tokens x 4096 x 32 = 25.8 GB, at the peak 42.2 GB
#   (python -m planning.memory configs/mpt7b_mi250.py --ranks=8).
# Cost, by plan.py, not measured: 67 to 120 days, at 23,000 to 12,900 tokens/s in all.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt7b_mi250.py
d_model = 4096
n_heads = 32
n_layers = 32
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 1536
microbatch_size = 3
max_steps = 42600
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1.2e-4
decoupled_weight_decay = 0.0
sharding = "FULL_SHARD"  # ZERO1 is faster by plan.py, but takes 113 % of the memory
save_interval = 50
run_dir = "runs/mpt7b_mi250"
