"""Keys of DeepSpeed's config that a run does not take, and why."""

REFUSED = {
    "optimizer": "the optimizer is RunConfig's (--optimizer.name, --optimizer.lr …): DeepSpeed's section would drop "
    "CLIP's decay groups",
    "scheduler": "the learning rate is RunConfig's (--schedule.kind, --schedule.warmup_steps …)",
    "fp16": "fp16 is not supported: use --precision bf16 or --precision amp",
    "amp": "NVIDIA Apex is not used: --precision amp is torch's autocast",
    "bfloat16": 'the section is called "bf16" now',
    "sparse_gradients": "the token embedding's gradient is dense",
    "sparse_attention": "attention is open_clip's",
    "data_efficiency": "the data stream is this project's own (--data.…)",
    "curriculum_learning": "the data stream is this project's own (--data.…)",
    "dataloader_drop_last": "the data stream is this project's own (--data.…), and each of its batches is whole",
    "elasticity": "give the batch as global_batch; a run resumes on another number of GPUs by itself",
    "autotuning": "the per-GPU batch is given as micro_batch",
    "managed_gradient_accumulation": "gradient_accumulation_steps are cached feature gradients here",
    "gradient_allreduce_op": "the loss counts on the mean over ranks",
    "disable_allgather": "the optimizer's new weights have to reach every rank",
    "pipeline": "two towers are not a pipeline",
    "tensor_parallel": "the ranks are data parallel, each with both towers",
    "expert_parallel": "the towers have no experts",
    "use_data_before_expert_parallelism": "the towers have no experts",
    "data_parallel_size": "all ranks are data parallel",
    "sequence_parallel_size": "the ranks are data parallel, each with whole sequences",
    "seq_parallel_communication_data_type": "the ranks are data parallel, each with whole sequences",
    "hybrid_engine": "it is for generating text while training",
    "compression_training": "weights are trained as they are",
    "quantize_training": "weights are trained as they are",
    "weight_quantization": "weights are trained as they are",
    "eigenvalue": "weights are trained as they are",
    "progressive_layer_drop": "every block is trained at every step; --model.patch_dropout saves time in its stead",
    "graph_harvesting": "the step is not recorded as a graph",
    "tensorboard": "metrics are written by --logging.tensorboard",
    "wandb": "metrics are written by --logging.wandb",
    "csv_monitor": "metrics are in metrics.jsonl of the run's folder",
    "comet": "metrics are written by --logging.tensorboard or --logging.wandb",
    "timers": "seconds and samples a second are in metrics.jsonl of the run's folder",
    "nebula": "checkpoints are this project's own (--checkpoint.…)",
    "datastates_ckpt": "checkpoints are this project's own (--checkpoint.…)",
    "vocabulary_size": "the vocabulary is the model's",
}
"""Keys of DeepSpeed, present or past, that a run does not take, and why. A switch that is off may stand there."""
REPLACED = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": '"pin_memory" in offload_optimizer and offload_param',
}
"""Keys of zero_optimization that DeepSpeed has replaced, and by what."""
