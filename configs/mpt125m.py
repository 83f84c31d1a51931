# MPT-125M: LLM Foundry's recipe, learned positions and biases.
# A step: 256 sequences x 2048 = 524,288 tokens; x 4,800 steps = 2.5B tokens, 20.1 a parameter (125M).
# On 8 devices: 256 = 8 x microbatch 16 x 2 accumulation steps.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt125m.py
d_model = 768
n_heads = 12
n_layers = 12
max_seq_len = 2048
vocab_size = 50368  # GPT-2's 50257 and room
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 256
microbatch_size = 16
max_steps = 4800
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 6e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "none"
eval_interval = 500
save_interval = 500
run_dir = "runs/mpt125m"
