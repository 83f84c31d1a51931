# MPT-1B: LLM Foundry's recipe, learned positions and biases.
# A step: 512 sequences x 2048 = 1,048,576 tokens; x 24,800 steps = 26.0B tokens, 19.8 a parameter (1.32B).
# On 8 devices: 512 = 8 x microbatch 4 x 16 accumulation steps.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt1b.py
d_model = 2048
n_heads = 16
n_layers = 24
max_seq_len = 2048
vocab_size = 50368  # GPT-2's 50257 and room
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 512
microbatch_size = 4
max_steps = 24800
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 2e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "none"
eval_interval = 500
save_interval = 500
run_dir = "runs/mpt1b"
