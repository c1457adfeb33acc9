"""Options of the original systems that are not offered, each with the reason in its error message.

Most of them control the compiler or the memory of one vendor and do not change results; others were never read by the
program that declared them. The pages under docs/migrating repeat every reason, and a test compares them.
"""

ONE_DEVICE = "use --replicas N for the number of copies, on any device"
_TPU = f"TPUs are not supported; {ONE_DEVICE}"
_FUSION = "operator fusion of the vendor's compiler has no counterpart here; omit it"
_DUMPS = "dumps are written to the run folder; omit it"
_NO_TRACE = "`convolve bench train --profile` writes a trace; training.csv contains the time of every log interval"
_MEMORY_PLAN = "it plans the on-chip memory of an IPU, which other devices do not have; omit it"
_EXCHANGE = "it controls the data exchange between IPU tiles; omit it"
_OFFLOAD = "PyTorch places tensors, and 16.32 computes the same results with any placement; omit it"
_STABLE = "norm statistics are always computed stably, in fp32 unless --half-norm-statistics is given; omit it"
_HOST_CALLS = "steps are not grouped into device calls; omit it"
_COMPILED = (
    "nothing is compiled in advance; check a config without training with `convolve plan` or `convolve describe`"
)
_SHARDING = "stages start at named blocks; use --pipeline-splits"
_FINE_TUNING = "fine-tuning is a separate run; use --weights RUN --freeze-until BLOCK"
_RESUME = "resume a run with `convolve restore RUN`, or load only its weights with --weights RUN"

ASCEND = {
    "autotune": "the vendor's kernel tuning has no counterpart here; omit it",
    "ckpt-count": "the original never read it; use --keep-checkpoints N to keep the newest N",
    "clean": "training never deletes a run folder; every run gets a new one, or the one named by --run-dir",
    "data-dump-path": _DUMPS,
    "eval-static": "shapes are always known and every test image counts; omit it",
    "fusion-off-file": _FUSION,
    "fusion-off-flag": _FUSION,
    "iteration-per-loop": _HOST_CALLS,
    "learing-rata": "it was misspelled and never read; use --learning-rate",
    "mul-device-id": "devices are numbered automatically; use --device cuda:1 to select one",
    "num-tpu-shards": _TPU,
    "over-dump-path": _DUMPS,
    "profiler-port": "no profiling server is started; omit it",
    "profiling": _NO_TRACE,
    "profiling-dump-path": _NO_TRACE,
    "random-remove": "the original never read it; omit it",
    "task-index": "`convolve launch` or torchrun assigns ranks; omit it",
    "tpu": _TPU,
    "tpu-gcp-project": _TPU,
    "tpu-zone": _TPU,
    "worker-hosts": "use `convolve launch --hosts`, or torchrun",
}

PADDLE = {
    "ues-ipu-model": "it was misspelled; saved models accept any batch size, so nothing has to be rewritten",
    "use-data-parallel": f"it never worked in the original; {ONE_DEVICE}",
}

GRAPHCORE = {
    "analyze-nans": "use --fp-exceptions, which stops at the first non-finite value and reports its layer",
    "available-memory-proportion": _MEMORY_PLAN,
    "checkpoint-input-dir": _RESUME,
    "ckpt-all-instances": "all processes have the same weights, and rank 0 saves them; omit it",
    "ckpt-epochs-offset": "the last step is always saved; omit it",
    "compile-only": _COMPILED,
    "dataloader-rebatch-size": "threads decode single images directly into the batch; omit it",
    "dataset-benchmark": "measure the input with `convolve bench data`",
    "disable-stable-batchnorm": _STABLE,
    "disable-variable-offloading": _OFFLOAD,
    "distributed": "use --replicas N, `convolve launch` or torchrun",
    "enable-conv-dithering": _EXCHANGE,
    "enable-fast-groupnorm": "only one group norm exists, with portable checkpoints; omit it",
    "exchange-memory-target": _EXCHANGE,
    "fine-tune-epoch": _FINE_TUNING,
    "fine-tune-gradient-accumulation": _FINE_TUNING,
    "fine-tune-lr": _FINE_TUNING,
    "fine-tune-micro-batch-size": _FINE_TUNING,
    "force-unstable-norm": _STABLE,
    "force-weight-to-fp16": "use --precision 16.16 for all weights, and --force-fp32 LAYER for exceptions",
    "full-precision-norm": "norm statistics are fp32 unless --half-norm-statistics is given; omit it",
    "fused-preprocessing": "bytes are normalized on the device in one pass, without a fourth channel; omit it",
    "gather-conv-output": _EXCHANGE,
    "gradient-mean-reduce-re": "gradients are divided by the true number of samples, then summed; omit it",
    "half-res-training": "train with --image-size 160 first, then a second run with --weights RUN at the full size",
    "hostside-image-mixing": "images are mixed on the device of the batch, with the same result; omit it",
    "inference": "validation always uses every test image once; omit it",
    "input-image-padding": "no fourth channel is added; omit it",
    "internal-exchange-optimization-target": _EXCHANGE,
    "latency": "measure mean, p50, p99 and p99.9 with `convolve bench infer`",
    "log-all-instances": "rank 0 logs for all processes; omit it",
    "loss-velocity-scaling-ratio": "momentum and accumulator are always stored separately; omit it",
    "max-cross-replica-buffer-size": "gradients are reduced in buckets during the backward pass; omit it",
    "max-reduce-many-buffer-size": _EXCHANGE,
    "min-remote-tensor-size": _OFFLOAD,
    "model-cache-path": _COMPILED,
    "no-proxy-recompute": "the moments of the proxy are always recomputed, at negligible cost; omit it",
    "num-io-tiles": _MEMORY_PLAN,
    "offline-target-ipu-version": _COMPILED,
    "offload-fp32-weight-copy": _OFFLOAD,
    "offload-optimizer": _OFFLOAD,
    "on-demand": "devices are opened on demand; omit it",
    "only-use-slic-vmac-16": _EXCHANGE,
    "prefetch-depth": "the loader prefetches automatically, without changing results; omit it",
    "profile": _NO_TRACE,
    "random-weights": "`convolve bench infer` measures random weights unless a run is given; omit it",
    "repeat": "`convolve bench infer` repeats and averages",
    "restore-path": _RESUME,
    "scheduling-algorithm": "it orders operations to save IPU memory; PyTorch schedules them itself; omit it",
    "select-ipu": "use --device, for example --device cuda:1",
    "select-ipus": "use --device, for example --device cuda:1",
    "sharding-exclude-filter": _SHARDING,
    "sharding-include-filter": _SHARDING,
    "stable-norm": _STABLE,
    "standard-imagenet": "the only input pipeline is reproducible with any number of threads; omit it",
    "syncs-per-epoch": "replicas sum the same gradients and never diverge; use --epochs-per-sync N to check it",
    "use-bbox-info": "boxes are used if the data contain them; omit it",
    "wandb-weight-histogram": "use --survey-freq N, which records the exponents of every layer",
    "webdataset-memory-cache-ratio": "the cache size is given in gigabytes; use --cache-memory",
}

REFUSED = {**PADDLE, **ASCEND, **GRAPHCORE}
