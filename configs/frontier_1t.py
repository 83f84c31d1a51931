# GPT-3's shape with 1,008B parameters on Frontier: the recipe of arXiv 2312.12705, from memory.
# The launch scripts have tp 4 x pp 128 instead, on 128 nodes with a batch of 1,024: bubble 19.9 %.
# Not run on AMD hardware. Speed published: 61.2 TFLOP/s a GCD, 32.0 % of the peak: 630 s a step.
# Ranks: 3,072 GCDs ("GPUs" in the press) = tp 8 x pp 64 x dp 6. Layers: 128 = 2 on each stage.
# Batch: 9,600 = dp 6 x 1,600 microbatches of 1. Bubble: 63 / (1600 + 63) = 3.8 %.
# Tokens: 9600 sequences x 2048 = 19,660,800 per step; x 1,025,000 steps = 20.15T, 20 per parameter.
# Memory, computed: 32.8 GB of a GCD's 68.7. One copy of all state: 16 bytes a parameter, 16.1 TB;
#   the paper's table has 14, without one of Adam's moments, and its introduction 24 TB.
# Launch: sbatch --nodes=384 --signal=USR1@1800 slurm/train_srun.sbatch configs/frontier_1t.py
# Plan: python plan.py configs/frontier_1t.py --device=mi250x --devices=3072
d_model = 25600
n_heads = 200
n_layers = 128
dataset = "allenai/c4:en"
global_batch_size = 1600 * 6
microbatch_size = 1
max_steps = 1025000
lr = 4e-5  # not published
tp = 8
pp = 64
sharding = "ZERO1"
activation_checkpointing = "full"
eval_tokens = 100_000  # evaluation waits for all stages in turn
save_interval = 5
run_dir = "runs/frontier_1t"
