# LoRA on the released MPT-7B: adapters of rank 8 on all linear layers, 16,777,216 parameters that
# train. Not run with the real weights. The folder mpt-7b: see configs/finetune_mpt7b.py.
# Launch: python fsdp_train.py configs/lora_mpt7b.py, on one device; 32.8M tokens in 500 steps.
# Memory by plan.py, not measured on a GPU; the frozen weights take 13.3 GB, in bf16:
#   1 device of 24 GB: as it is, 19.6 GiB
#   1 device of 64 GB (GCD), 80 GB: --activation_checkpointing=none --microbatch_size=4, 45.2 GiB
d_model = 4096
n_heads = 32
n_layers = 32
vocab_size = 50432
alibi = no_bias = attn_uses_sequence_id = True  # the last: the examples of a row stay apart
init_from = "mpt-7b"
lora_rank = 8
tokenizer = "mpt-7b/tokenizer.json"  # needs requirements-extra.txt
data_format = "chat"
dataset = "my/*.jsonl"
val_fraction = 0.05
global_batch_size = 32
microbatch_size = 8
max_steps = 500
lr = 2e-4
warmup_steps = 20
activation_checkpointing = "full"
eval_interval = save_interval = 100
run_dir = "runs/lora_mpt7b"
