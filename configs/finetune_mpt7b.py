# Finetunes the released MPT-7B on prompts and responses (text/README.md shows their lines). Not run
# with the real weights. Folder mpt-7b, from the Hub: config.json, tokenizer.json, the weights.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/finetune_mpt7b.py
# Memory, computed, not measured on a GPU; weights, gradients and Adam take 106 GB in all:
#   8 devices of 24 GB: as it is, 18.2 GiB
#   2 devices of 64 GB (an MI250) or 80 GB: --microbatch_size=4, 55.1 GiB
# One device: configs/lora_mpt7b.py. The batch: 8 devices x microbatch 8, 65.5M tokens in all.
d_model = 4096
n_heads = 32
n_layers = 32
vocab_size = 50432
alibi = no_bias = attn_uses_sequence_id = True  # the last: the examples of a row stay apart
init_from = "mpt-7b"
tokenizer = "mpt-7b/tokenizer.json"  # needs requirements-extra.txt
data_format = "chat"
dataset = "my/*.jsonl"
val_fraction = 0.05
global_batch_size = 64
microbatch_size = 8
max_steps = 500
lr = 5e-6
warmup_steps = 20
activation_checkpointing = "full"
eval_interval = save_interval = 100
run_dir = "runs/finetune_mpt7b"
