# GPT-3's shape with 22B parameters on 2 nodes of Frontier: the recipe of arXiv 2312.12705.
# Not run on AMD hardware. Speed published: 73.5 TFLOP/s a GCD, 38.4 % of the peak: 150 s a step.
# Ranks: 16 GCDs = tp 1 x pp 8 x dp 2. Layers: 48 = 6 on each stage.
# Batch: 640 = dp 2 x 320 microbatches of 1. Bubble: 7 / (320 + 7) = 2.1 %.
# Tokens: 640 sequences x 2048 = 1,310,720 per step; x 337,000 steps = 441.7B, 20 per parameter.
# Memory, computed: 57.8 GB of a GCD's 68.7. "ZeRO-0" is DDP here: weights 4 + 2 bytes a parameter,
#   gradients 4, Adam 8. --sharding=ZERO1 takes 39.7 GB.
# Launch: sbatch --nodes=2 --signal=USR1@600 slurm/train_srun.sbatch configs/frontier_22b.py
# Plan: python plan.py configs/frontier_22b.py --device=mi250x --devices=16
d_model = 6144
n_heads = 48
n_layers = 48
max_seq_len = 2048
dataset = "allenai/c4:en"
tokenizer = "gpt2"
global_batch_size = 640
microbatch_size = 1
max_steps = 337000
lr = 1e-4  # not published
tp = 1
pp = 8
sharding = "DDP"
activation_checkpointing = "full"
save_interval = 20
run_dir = "runs/frontier_22b"
