# MPT-125M with Llama's block (153M parameters, 77M of them in embedding and output layer).
# Tokens: 256 sequences x 2048 = 524,288 per step; x 5,800 steps = 3.04B, 19.9 per parameter.
# Batch: 256 = 8 devices x microbatch 16 x 2 accumulation steps.
# Cost: 0.65 hours on 8 x A100 80GB, at the 163,000 tokens/s each that plan.py computes.
# Larger: width, heads, layers, rate and batch of configs/mpt*.py, and expansion_ratio 2.6875 for
#   d_model 1024, 2048 and 4096: a multiple of 64 wide, 11,008 for the last, as in Llama 7B.
# Launch: torchrun --nproc_per_node 8 fsdp_train.py configs/llama_like.py
d_model = 768
n_heads = 12
kv_n_heads = 4  # three query heads share keys and values: a third of the cache
n_layers = 12
max_seq_len = 2048
rope = no_bias = True  # rotary positions: no learned ones, and no ALiBi
norm_type = "low_precision_rmsnorm"  # in bf16; rmsnorm: in fp32
ffn_type = "mptglu"  # gated: with SiLU it is SwiGLU
ffn_act_fn = "silu"
expansion_ratio = 8 / 3  # width 2,048: three matrices cost what MPT's two of 4 x 768 cost
tie_word_embeddings = False  # an output layer of its own
dataset = "allenai/c4:en"
global_batch_size = 256
microbatch_size = 16
max_steps = 5800
max_tokens = max_steps * global_batch_size * max_seq_len
sharding = "ZERO1"  # faster than FULL_SHARD by plan.py, and fits
run_dir = "runs/llama-like"
