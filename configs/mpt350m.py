# MPT-350M: LLM Foundry's recipe, learned positions and biases.
# A step: 256 sequences x 2048 = 524,288 tokens; x 13,400 steps = 7.0B tokens, 19.7 a parameter (356M).
# On 8 devices: 256 = 8 x microbatch 8 x 4 accumulation steps.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt350m.py
d_model = 1024
n_heads = 16
n_layers = 24
max_seq_len = 2048
vocab_size = 50368  # GPT-2's 50257 and room
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 256
microbatch_size = 8
max_steps = 13400
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 3e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "none"
eval_interval = 500
save_interval = 500
run_dir = "runs/mpt350m"
