#!/usr/bin/env bash
# One run on many machines under SLURM: sbatch --nodes 8 launch/slurm.sh --config run.yaml --ds_config zero2
#
# One task a machine; torchrun starts a rank for each GPU there. Five minutes before the time limit SLURM sends SIGTERM to
# every process of the job: the run ends its step, saves, and the same sbatch goes on from there. torchrun would kill its
# ranks 30 seconds after that signal; it is told to wait.
#SBATCH --job-name=disco_ds
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
GPUS=${SLURM_GPUS_ON_NODE:-8}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}

exec srun --kill-on-bad-exit=1 bash -c '
  exec torchrun --nnodes '"$SLURM_JOB_NUM_NODES"' --nproc-per-node '"$GPUS"' --node-rank "$SLURM_NODEID" \
    --master-addr '"$MASTER_ADDR"' --master-port '"$MASTER_PORT"' -m disco_ds.cli.train "$@"' bash "$@"
