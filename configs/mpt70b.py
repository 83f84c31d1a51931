# MPT-70B (64.86B parameters; 1,038 GB of weights, gradients and Adam): LLM Foundry's recipe.
# Tokens: 2048 sequences x 2048 = 4,194,304 per step; x 333,800 steps = 1.40T, 21.6 per parameter.
# Batch: 2048 = 64 devices x microbatch 4 x 8 accumulation steps.
# C4's English part has about 156B tokens (Dodge et al., 2021): seen about 9 times.
# Cost, by plan.py for 64 x A100 80GB: 600 to 802 days, at 27,000 to 20,200 tokens/s in all.
# Launch on each of 8 nodes: torchrun --nnodes 8 --nproc_per_node 8 --rdzv_backend c10d \
#   --rdzv_endpoint HEAD_NODE:29500 fsdp_train.py configs/mpt70b.py
d_model = 8192
n_heads = 64
n_layers = 80
max_seq_len = 2048
vocab_size = 50368  # GPT-2 has 50,257 tokens; the rest is spare
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 2048
microbatch_size = 4
max_steps = 333800
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 8e-5
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "full"
save_interval = 250
run_dir = "runs/mpt70b"
