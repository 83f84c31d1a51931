# MPT-7B (6.66B parameters): LLM Foundry's recipe, with learned positions and biases.
# Tokens: 1024 sequences x 2048 = 2,097,152 per step; x 63,900 steps = 134.0B, 20.1 per parameter.
# Batch: 1024 = 8 devices x microbatch 8 x 16 accumulation steps.
# Cost: 42 days on 8 x A100 80GB, at the 4,641 tokens/s each (best of LLM Foundry's rows).
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt7b.py
d_model = 4096
n_heads = 32
n_layers = 32
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 1024
microbatch_size = 8
max_steps = 63900
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1.2e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py: 67 % of 80 GB; it does not fit 40 GB
activation_checkpointing = "full"
save_interval = 250
run_dir = "runs/mpt7b"
