# MPT-13B (12.85B parameters): LLM Foundry's recipe, with learned positions and biases.
# Tokens: 1024 sequences x 2048 = 2,097,152 per step; x 124,000 steps = 260.0B, 20.2 per parameter.
# Batch: 1024 = 8 devices x microbatch 8 x 16 accumulation steps.
# C4's English part has about 156B tokens (Dodge et al., 2021): seen about 1.7 times.
# Cost: 166 days on 8 x A100 80GB, at the 2,262 tokens/s each (best of LLM Foundry's rows).
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt13b.py
d_model = 5120
n_heads = 40
n_layers = 40
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 1024
microbatch_size = 8
max_steps = 124000
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "full"
save_interval = 250
run_dir = "runs/mpt13b"
