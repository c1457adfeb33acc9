"""Options of the original systems that are not offered, each with the reason that typing it gives.

Most of them steered one vendor's compiler or memory and say nothing about what is learned; others were never read by
the program that declared them. The pages under docs/migrating repeat every reason, and a test holds them together.
"""

ONE_DEVICE = "the number of copies is --replicas N here, on whatever devices there are"
_TPU = f"no TPU is driven from here; {ONE_DEVICE}"
_FUSION = "operator fusion of the vendor's compiler has no counterpart here; leave it out"
_DUMPS = "dumps go into the run folder; leave it out"
_NO_TRACE = "a trace is made by `convolve bench train --profile`; training.csv has the time of every log interval"
_MEMORY_PLAN = "it plans the on-chip memory of an IPU; no other device has such a plan; leave it out"
_EXCHANGE = "it steers the IPU compiler's exchange of data between tiles; leave it out"
_OFFLOAD = "PyTorch decides where tensors lie, and 16.32 is the same arithmetic wherever its copies are; leave it out"
_STABLE = "norm statistics are computed stably, and in fp32 unless --half-norm-statistics is given; leave it out"
_HOST_CALLS = "steps are not grouped into device calls here; leave it out"
_COMPILED = "nothing is compiled beforehand; `convolve plan` and `convolve describe` check a config without training"
_SHARDING = "stages begin at named blocks: --pipeline-splits, or --pipeline-splits auto"
_FINE_TUNING = "fine-tuning is a run of its own, with its own options: --init-path RUN --freeze-until BLOCK"
_RESUME = "`convolve restore RUN` goes on with a run; --init-path RUN only takes its weights"

ASCEND = {
    "autotune": "the vendor's kernel tuning has no counterpart here; leave it out",
    "ckpt-count": "it was never read by the original; --keep-checkpoints N keeps the newest N",
    "clean": "a run folder is never deleted by training; every run gets a new one, or name it with --run-dir",
    "data-dump-path": _DUMPS,
    "eval-static": "shapes are always known and every test image is counted; leave it out",
    "fusion-off-file": _FUSION,
    "fusion-off-flag": _FUSION,
    "iteration-per-loop": _HOST_CALLS,
    "learing-rata": "it was misspelt and never read; write --learning-rate",
    "mul-device-id": "devices are numbered by themselves; --device cuda:1 names one",
    "num-tpu-shards": _TPU,
    "over-dump-path": _DUMPS,
    "profiler-port": "no profiling server is started; leave it out",
    "profiling": _NO_TRACE,
    "profiling-dump-path": _NO_TRACE,
    "random-remove": "it was never read by the original and means nothing here",
    "task-index": "ranks are given by `convolve launch` or torchrun; leave it out",
    "tpu": _TPU,
    "tpu-gcp-project": _TPU,
    "tpu-zone": _TPU,
    "worker-hosts": "hosts are given to `convolve launch --hosts` or torchrun; leave it out",
}

PADDLE = {
    "ues-ipu-model": "it was misspelt; the saved model here takes any batch size, nothing has to be rewritten",
    "use-data-parallel": f"it never worked in the original; {ONE_DEVICE}",
}

GRAPHCORE = {
    "abs-end-learning-rate": "the last rate is a share of the first, so that it follows it: --poly-lr-end-ratio",
    "analyze-nans": "--fp-exceptions stops at the first number that is not finite and names its layer",
    "available-memory-proportion": _MEMORY_PLAN,
    "batches-per-step": _HOST_CALLS,
    "checkpoint-input-dir": _RESUME,
    "ckpt-all-instances": "all processes hold the same weights, and rank 0 saves them; leave it out",
    "ckpt-epochs-offset": "the last step is always saved, so nothing has to be shifted; leave it out",
    "compile-only": _COMPILED,
    "dataloader-rebatch-size": "threads decode single pictures straight into the batch; leave it out",
    "dataset-benchmark": "`convolve bench data` measures the input alone",
    "device-iterations": _HOST_CALLS,
    "disable-stable-batchnorm": _STABLE,
    "disable-variable-offloading": _OFFLOAD,
    "distributed": "processes are started by --replicas N, `convolve launch` or torchrun; leave it out",
    "enable-conv-dithering": _EXCHANGE,
    "enable-fast-groupnorm": "there is one group norm, whose checkpoints fit everywhere; leave it out",
    "exchange-memory-target": _EXCHANGE,
    "fine-tune-epoch": _FINE_TUNING,
    "fine-tune-gradient-accumulation": _FINE_TUNING,
    "fine-tune-lr": _FINE_TUNING,
    "fine-tune-micro-batch-size": _FINE_TUNING,
    "force-unstable-norm": _STABLE,
    "force-weight-to-fp16": "--precision 16.16 stores all weights in 16 bits, and --force-fp32 LAYER excepts some",
    "full-precision-norm": "norm statistics are fp32 unless --half-norm-statistics is given; leave it out",
    "fused-preprocessing": "bytes are normalized on the device in one pass, without a fourth channel; leave it out",
    "gather-conv-output": _EXCHANGE,
    "gradient-mean-reduce-re": "gradients are divided by the true number of samples, then added; leave it out",
    "half-res-training": "train with --image-size 160 first, then a second run with --init-path RUN at the full size",
    "hostside-image-mixing": "images are mixed where the batch is, with the same result; leave it out",
    "inference": "validation always counts every test image once; leave it out",
    "input-image-padding": "no fourth channel is added; leave it out",
    "internal-exchange-optimization-target": _EXCHANGE,
    "latency": "`convolve bench infer` measures mean, p50, p99 and p99.9",
    "log-all-instances": "rank 0 logs for all; leave it out",
    "loss-velocity-scaling-ratio": "momentum and accumulator are never stored as one here; leave it out",
    "lr-epoch-decay": "drops are shares of the run here, so that they move with its length: --learning-rate-schedule",
    "lr-scheduler-freq": "the rate follows its curve at every step; exponential drops are counted by --lr-drops",
    "max-cross-replica-buffer-size": "gradients travel in buckets while the backward pass runs; leave it out",
    "max-reduce-many-buffer-size": _EXCHANGE,
    "min-remote-tensor-size": _OFFLOAD,
    "model-cache-path": _COMPILED,
    "no-proxy-recompute": "the proxy's moments are always computed anew, they cost next to nothing; leave it out",
    "num-io-tiles": _MEMORY_PLAN,
    "offline-target-ipu-version": _COMPILED,
    "offload-fp32-weight-copy": _OFFLOAD,
    "offload-optimizer": _OFFLOAD,
    "on-demand": "a device is opened when it is needed; leave it out",
    "only-use-slic-vmac-16": _EXCHANGE,
    "prefetch-depth": "the loader works ahead by itself, and never changes results; leave it out",
    "profile": _NO_TRACE,
    "repeat": "`convolve bench infer` repeats and takes the mean",
    "restore-path": _RESUME,
    "scheduling-algorithm": "it orders operations to save IPU memory; PyTorch has its own order; leave it out",
    "select-ipu": "--device names the device, as in --device cuda:1",
    "select-ipus": "--device names the device, as in --device cuda:1",
    "sharding-exclude-filter": _SHARDING,
    "sharding-include-filter": _SHARDING,
    "stable-norm": _STABLE,
    "standard-imagenet": "there is one input pipeline here, and it is repeatable with any number of threads",
    "syncs-per-epoch": "replicas add the same gradients and never drift apart; --epochs-per-sync N checks it",
    "use-bbox-info": "boxes are looked at wherever the data have them; leave it out",
    "wandb-weight-histogram": "--survey-freq N records the exponents of every layer; leave it out",
    "weight-avg-strategy": "an average is asked for by its own option: --weight-avg-n N or --weight-avg-exp DECAY",
    "webdataset-memory-cache-ratio": "the cache is told in gigabytes, and fills while they last: --cache-memory",
}

REFUSED = {**PADDLE, **ASCEND, **GRAPHCORE}
