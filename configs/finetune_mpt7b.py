# Finetunes the released MPT-7B (ALiBi, no biases, 50,432 ids) on your text. Not run with the real
# weights. The folder mpt-7b is the model from the Hub: config.json, tokenizer.json, the weights.
# Tokens: 64 sequences x 2048 = 131,072 per step; x 500 steps = 65.5M.
# Batch: 64 = 8 devices x microbatch 8 x 1 accumulation step.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/finetune_mpt7b.py
d_model = 4096
n_heads = 32
n_layers = 32
max_seq_len = 2048
vocab_size = 50432
alibi = True
no_bias = True
init_from = "mpt-7b"
tokenizer = "mpt-7b/tokenizer.json"  # needs requirements-extra.txt
dataset = "my/*.txt"
val_fraction = 0.05
global_batch_size = 64
microbatch_size = 8
max_steps = 500
lr = 5e-6
warmup_steps = 20
activation_checkpointing = "full"
eval_interval = 100
save_interval = 100
run_dir = "runs/finetune_mpt7b"
