"""Tensors of the virtual accelerator, its device module, and what it counts."""

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "virt"
aten = torch.ops.aten
# Their result has a size or a value that the host must know.
BLOCKING = {aten.equal.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default}
BLOCKING |= {aten.bincount.default, aten.is_nonzero.default}


@dataclass
class Counts:
    """What the host did with the device."""

    operations: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    synchronizations: int = 0


COUNTS = Counts()


class Memory:
    """Bytes in use, by storage; counted only if there is a limit."""

    def __init__(self):
        self.limit = int(os.environ.get("VIRT_MEMORY", 0))
        self.used = 0
        self._owners = Counter()

    def hold(self, tensor):
        """Count the storage of a tensor until the tensor is gone."""
        storage = tensor.host.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not self._owners[key]:
            if self.used + size > self.limit:
                free = self.limit - self.used
                DEVICE.report(
                    torch.OutOfMemoryError(f"virt out of memory. Tried to allocate {size} bytes, {free} are free.")
                )
            self.used += size
        self._owners[key] += 1
        tensor.allocation = Allocation(self, key, size)

    def release(self, key, size):
        """Count one tensor of a storage less."""
        self._owners[key] -= 1
        if not self._owners[key]:
            self.used -= size


class Allocation:
    """A tensor's part of the memory, released with the tensor. (torch cannot swap tensors with weak references.)"""

    def __init__(self, memory, key, size):
        self._memory, self._key, self._size = memory, key, size

    def __del__(self):
        self._memory.release(self._key, self._size)


class Device(_DummyBackendModule):
    """The module `torch.virt`."""

    def __init__(self):
        self.index = 0
        self.memory = Memory()
        self.fail_after = int(os.environ.get("VIRT_FAIL_AFTER", 0))
        self.delay = float(os.environ.get("VIRT_DELAY", 0))
        self.error = None

    def device_count(self):
        return int(os.environ.get("VIRT_DEVICES", "1"))

    def is_available(self):
        return self.device_count() > 0

    def current_device(self):
        return self.index

    def set_device(self, device):
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        if index is not None:
            if not 0 <= index < self.device_count():
                raise torch.AcceleratorError(f"virt error: invalid device ordinal {index}")
            self.index = index

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def synchronize(self, device=None):
        COUNTS.synchronizations += 1

    def get_amp_supported_dtype(self):
        return [getattr(torch, name) for name in os.environ.get("VIRT_16_BITS", "float16,bfloat16").split(",") if name]

    def before_operation(self):
        """Count an operation, which may take its time or fail."""
        COUNTS.operations += 1
        if self.delay:
            time.sleep(self.delay)
        if self.fail_after and COUNTS.operations > self.fail_after:
            self.report(torch.AcceleratorError("virt error: the device stopped responding"))
        elif self.error is not None:
            self.report(self.error)

    def report(self, error):
        """Raise an error on the thread of the program; torch's thread of the backward pass cannot pass it on."""
        self.error = error
        if threading.current_thread() is threading.main_thread():
            raise error


DEVICE = Device()


class VirtualTensor(torch.Tensor):
    """A tensor on the device; `host` has its data."""

    @staticmethod
    def __new__(cls, host, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        tensor.host = host
        if DEVICE.memory.limit:
            DEVICE.memory.hold(tensor)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        # Autograd of a Python backend supports one device per process, so all have index 0 for torch itself.
        return torch.device(NAME, DEVICE.index)

    @property
    def data(self):
        with torch.inference_mode(self.is_inference()):  # the mode of the tensor, as a device in C++ keeps it
            return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)  # rejects another kind of device, and tensors of inference mode
        self.host = value.host
        if DEVICE.memory.limit:
            self.allocation = value.allocation

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        DEVICE.before_operation()
        special = SPECIAL.get(operation)
        if special is not None:
            return special(*args, **kwargs)
        if _is_composite(operation):
            return operation.decompose(*args, **kwargs)  # inference mode leaves this to us
        if operation in BLOCKING:
            COUNTS.synchronizations += 1
        return run_on_device(operation, args, kwargs)

    def numpy(self, *, force=False):
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __array__(self, dtype=None):
        return self.numpy()

    def data_ptr(self):
        raise RuntimeError(f"the pointer of a {self.device} tensor is of no use to the host")

    def tolist(self):
        return _copy_to_host(self.detach().host).tolist()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = VirtualTensor(self.host.detach().clone(), self.requires_grad)
            if getattr(self, "_is_param", False):
                copy._is_param = True
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"a {self.device} tensor cannot be pickled; copy it to the host first")

    def __repr__(self):
        return f"VirtualTensor({self.host!r})"


def run_on_device(operation, args, kwargs):
    """Run an operation on the data of its arguments. All tensors must be on the device, except numbers."""
    values, spec = tree_flatten((args, kwargs))
    hosts = [_unwrap(value, operation) for value in values]
    host_args, host_kwargs = tree_unflatten(hosts, spec)
    target = host_kwargs.pop("device", None)
    if target is not None and torch.device(target).type != NAME:
        return operation(*host_args, device=target, **host_kwargs)
    result = operation(*host_args, **host_kwargs)
    owners = {id(host): value for host, value in zip(hosts, values, strict=True) if isinstance(value, VirtualTensor)}
    outputs, spec = tree_flatten(result)
    return tree_unflatten([_wrap(output, owners) for output in outputs], spec)


def _unwrap(value, operation):
    if isinstance(value, VirtualTensor):
        return value.host
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type != "meta":
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:{DEVICE.index} and "
            f"{value.device}! ({operation})"
        )
    return value


def _wrap(value, owners):
    if not isinstance(value, torch.Tensor):
        return value
    return owners[id(value)] if id(value) in owners else VirtualTensor(value)


def _copy_to_host(host, *, blocking=True):
    COUNTS.device_to_host += 1
    COUNTS.synchronizations += blocking
    return host.clone()


def _to_copy(source, *, device=None, non_blocking=False, pin_memory=None, layout=None, **kwargs):
    if device is not None and torch.device(device).type == "cpu":
        copy = _copy_to_host(source.host, blocking=not non_blocking)
        return aten._to_copy.default(copy, **kwargs)
    if device is not None and torch.device(device).type != NAME:
        return aten._to_copy.default(source.host, device=device, **kwargs)
    return VirtualTensor(aten._to_copy.default(source.host, **kwargs))


def _copy(destination, source, non_blocking=False):
    if not isinstance(destination, VirtualTensor):
        return destination.copy_(_copy_to_host(source.host, blocking=not non_blocking))
    if isinstance(source, VirtualTensor):
        destination.host.copy_(source.host)
    else:
        COUNTS.host_to_device += 1
        # Without pinned memory the host waits for the transfer.
        COUNTS.synchronizations += not (non_blocking and getattr(source, "in_pinned_memory", False))
        destination.host.copy_(source)
    return destination


def _read_number(tensor):
    return _copy_to_host(tensor.host).item()


SPECIAL = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _read_number,
}


def _make_factory(operation):
    def create(*args, device=None, pin_memory=None, **kwargs):
        DEVICE.before_operation()
        return VirtualTensor(operation(*args, **kwargs))

    return create


def _copy_from(source, destination, non_blocking=False):
    return _copy(destination, source, non_blocking)


@cache
def _is_composite(operation):
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


def _list_factories():
    """Yield the operations that create a tensor from none."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            arguments = getattr(packet, overload)._schema.arguments
            names = {argument.name for argument in arguments}
            if "device" in names and not any("Tensor" in str(argument.type) for argument in arguments):
                yield getattr(packet, overload)


def _make_16_bit(operation):
    """Wrap an operation that autocast computes in 16 bits."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value):
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if is_wide else value

    def compute(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operation(*map(cast, args), **kwargs)

    return compute


def _register_autocast():
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for operation in (aten.conv2d.default, aten.linear.default):
        library.impl(operation, _make_16_bit(operation))
    _REGISTRATIONS.extend((others, library))


_REGISTRATIONS = []


def register():
    """Add the device to torch."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=DEVICE)
    library = torch.library.Library("aten", "IMPL")
    for operation in _list_factories():
        if not _is_composite(operation):
            library.impl(operation.name().removeprefix("aten::"), _make_factory(operation), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    _REGISTRATIONS.append(library)
    _register_autocast()
    torch.__future__.set_swap_module_params_on_conversion(True)
    # The parts of a device that Python cannot register.
    torch.accelerator.synchronize = DEVICE.synchronize
    torch.accelerator.set_device_index = DEVICE.set_device
    torch.accelerator.current_device_index = DEVICE.current_device
    torch.Tensor.pin_memory = _pin_memory
    torch.Tensor.is_pinned = lambda tensor, device=None: getattr(tensor, "in_pinned_memory", False)


def _pin_memory(tensor, device=None):
    if isinstance(tensor, VirtualTensor):
        raise RuntimeError("cannot pin a tensor of the device; only host memory can be pinned")
    pinned = tensor.clone()
    pinned.in_pinned_memory = True
    return pinned
