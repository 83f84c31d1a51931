# MPT-3B on a node of 4 x MI250: 8 torch devices of 64 GB, no recomputation.
# A step: 512 sequences x 2048 = 1,048,576 tokens; x 51,500 steps = 54.0B tokens, 20.4 a parameter (2.65B).
# On 8 devices: 512 = 8 x microbatch 4 x 16 accumulation steps.
# Computed to fit 64 GB, not measured on AMD hardware (python -m planning.memory configs/mpt3b_mi250.py --ranks=8):
#   16 bytes a parameter / 8 = 5.3 GB, activations 32 bytes x 8192 tokens x 2560 x 32 = 21.5 GB, at the peak 28.6 GB.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/mpt3b_mi250.py
d_model = 2560
n_heads = 20
n_layers = 32
max_seq_len = 2048
vocab_size = 50368  # GPT-2's 50257 and room
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 512
microbatch_size = 4
max_steps = 51500
max_tokens = max_steps * global_batch_size * max_seq_len
lr = 1.6e-4
warmup_steps = 100
alpha_f = 0.1
decoupled_weight_decay = 0.0
activation_checkpointing = "none"
eval_interval = 500
save_interval = 100
run_dir = "runs/mpt3b_mi250"
