# LoRA on the demo: it learns to say how many arguments a function takes, in a minute on a laptop.
# Tokens: 8 packed rows x 128 = 1,024 per step, about 64 questions; x 300 steps, two epochs.
# Batch: 8 = 2 ranks x 4 rows each, at once.
# Launch, after python -m lessons.questions: python fsdp_train.py configs/lora_demo.py
d_model = 256
n_heads = 8
n_layers = 4
vocab_size = 4096
max_seq_len = 128
alibi = no_bias = True
attn_uses_sequence_id = True  # keeps the questions of a row apart
init_from = "runs/demo"
lora_rank = 8
dataset = "data/questions/train.jsonl"
data_dir = "data/questions/tokens"
data_format = "chat"
tokenizer = "bpe-4096"
val_fraction = 0.02
global_batch_size = 8
max_steps = 300
lr = 1e-3
warmup_steps = 20
eval_interval = save_interval = 100
run_dir = "runs/lora-demo"
