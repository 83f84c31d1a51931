# GPT-3's shape with 175B parameters on Frontier: the recipe of arXiv 2312.12705 and its scripts.
# Not run on AMD hardware. Speed published: 69.2 TFLOP/s a GCD, 36.1 % of the peak: 310 s a step.
# Ranks: 1,024 GCDs ("GPUs" in the press) = tp 4 x pp 16 x dp 16. Layers: 96 = 6 on each stage.
# Batch: 10,240 = dp 16 x 640 microbatches of 1. Bubble: 15 / (640 + 15) = 2.3 %. That 640, as in
#   the scripts, is for each pipeline is from memory; if for all, the bubble is 15 / (40 + 15).
# Tokens: 10240 sequences x 2048 = 20,971,520 per step; x 166,500 steps = 3.492T, 20 per parameter.
# Memory, computed: 25.3 GB of a GCD's 68.7. On one pipeline alone (8 nodes): 52.9 GB.
# Launch: sbatch --nodes=128 --signal=USR1@900 slurm/train_srun.sbatch configs/frontier_175b.py
# Plan: python plan.py configs/frontier_175b.py --device=mi250x --devices=1024
d_model = 12288
n_heads = 96
n_layers = 96
max_seq_len = 2048
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 640 * 16
microbatch_size = 1
max_steps = 166500
lr = 6e-5  # GPT-3's, with a batch of 3.2M tokens
tp = 4
pp = 16
sharding = "ZERO1"
activation_checkpointing = "full"
save_interval = 5
run_dir = "runs/frontier_175b"
