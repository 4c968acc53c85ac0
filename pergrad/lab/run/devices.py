"""Where a run lies: on one device, or on a mesh of them, which may belong to several processes.

The mesh has two axes. `data` shares the examples: every device reduces the gradients of its own. `model`
shares the parameters, and with them their statistics and the optimizer's state: matrices that lead into
heads, hidden features or logits are divided by their outputs, and matrices that lead back are divided by
their inputs, so that each pair of matrices needs one sum over devices.

With `fsdp` the devices of the `data` axis share the parameters, statistics and states, too. A parameter
is gathered where it is used.

All processes run the same program on the same batches, and each process keeps the part of a batch that
its devices need. The first process writes the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pergrad.lab.errors import LabError, in_one_line
from pergrad.lab.run import peers
from pergrad.lab.run.peers import Peers, end

AXES = ("data", "model")
LEADING_BACK = {"out", "down"}  # layers that are divided by their inputs: see `model.Block`
STACK = "blocks"  # where layers are stacked: see `model.Transformer`
JAX_PATIENCE = 10  # time-outs until JAX, too, takes a silent process for dead: `Peers` comes first

Tree = Any


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices of a run: those of `mesh`, or the one that JAX takes.

    `fsdp` says whether the devices that share the examples share the parameters, too.
    """

    mesh: Mesh | None = None
    fsdp: bool = False

    @property
    def batch_axis(self) -> str | None:
        """The `spmd_axis_name` of `pg.value_and_stats`."""
        return None if self.mesh is None else "data"

    def check(self, batch_size: int) -> None:
        """Raises an error if the devices cannot share the examples of a batch."""
        if self.mesh is not None and batch_size % self.mesh.shape["data"]:
            raise LabError(
                f"{batch_size} examples cannot be divided among the {self.mesh.shape['data']} devices "
                "of --mesh data. Choose another --batch-size."
            )

    def examples(self, batch: Tree) -> Tree:
        """A batch, divided among the devices if they divide its size."""
        if self.mesh is None:
            return batch
        size = len(jax.tree.leaves(batch)[0])
        spec = P() if size % self.mesh.shape["data"] else P("data")
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(lambda x: _spread(x, sharding), batch)

    def spread(self, state: Tree) -> Tree:
        """Puts parameters, and states whose trees have the same names, on their devices."""
        return self._map(_spread, state)

    def kept(self, state: Tree) -> Tree:
        """The same as `spread` under `jit`: the state that a step returns stays on its devices."""
        return self._map(jax.lax.with_sharding_constraint, state)

    def specs(self, params: Tree) -> Tree:
        """The `param_specs` of `pg.value_and_stats`."""
        return jax.tree_util.tree_map_with_path(self._spec, params) if self.fsdp else None

    def _map(self, put: Any, state: Tree) -> Tree:
        mesh = self.mesh
        if mesh is None:
            return state
        return jax.tree_util.tree_map_with_path(
            lambda path, x: put(x, NamedSharding(mesh, self._spec(path, x))), state
        )

    def _spec(self, path: Any, x: Any) -> P:
        """How an array is divided. The layers of a stack are never divided among devices."""
        assert self.mesh is not None
        keys = {getattr(key, "key", None) for key in path}
        names: list[str | None] = [None] * x.ndim
        axis = x.ndim - (2 if LEADING_BACK & keys else 1)
        if x.ndim >= 2 and x.shape[axis] % self.mesh.shape["model"] == 0:
            names[axis] = "model"
        first = 1 if STACK in keys else 0
        free = [n for n in range(first, x.ndim) if names[n] is None]
        fitting = [n for n in free if x.shape[n] and x.shape[n] % self.mesh.shape["data"] == 0]
        if self.fsdp and fitting:
            names[max(fitting, key=lambda n: x.shape[n])] = "data"
        return P(*names) if any(names) else P()


def _spread(x: Any, sharding: NamedSharding) -> jax.Array:
    """Divides an array that every process has: each process keeps the parts of its own devices."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _spread(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def make_place(mesh: str | None, fsdp: bool = False) -> Place:
    """The place that the command line names, such as `data=2,model=2`."""
    if mesh is None:
        if fsdp:
            raise LabError("--fsdp divides the parameters among the devices of a mesh: --mesh data=4.")
        if jax.process_count() > 1:
            raise LabError(
                f"{jax.process_count()} processes need a mesh over their {jax.device_count()} devices: "
                f"--mesh data={jax.device_count()}."
            )
        return Place()
    sizes = _sizes(mesh)
    wanted, found = sizes["data"] * sizes["model"], jax.device_count()
    if wanted > found:
        raise LabError(
            f"--mesh {mesh} needs {wanted} devices, and there are {found}. To try it on the CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={-(-wanted // jax.process_count())}, "
            "which makes as many of it."
        )
    if wanted < found and jax.process_count() > 1:
        raise LabError(f"--mesh {mesh} has {wanted} of {found} devices; processes need all of them.")
    devices = np.array(jax.devices()[:wanted]).reshape([sizes[axis] for axis in AXES])
    return Place(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES)), fsdp)


def _sizes(mesh: str) -> dict[str, int]:
    sizes = {}
    for entry in mesh.split(","):
        axis, _, size = entry.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise LabError(f"--mesh is such as data=4 or data=2,model=2, not {mesh!r}.")
        sizes[axis] = int(size)
    return dict.fromkeys(AXES, 1) | sizes


def join(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: float = 30.0,
) -> Peers | None:
    """Makes this one of several processes, if it is to be; before JAX is used.

    Processes are waited for, and watched, for `timeout` seconds; on a cluster JAX does that.
    """
    numbers = num_processes, process_id
    if coordinator_address is None and numbers == (None, None):
        return None
    if not timeout >= 1:
        raise LabError(f"--coordinator-timeout is at least 1 second, not {timeout:g}.")
    seconds = math.ceil(timeout)
    if coordinator_address == "auto" and numbers == (None, None):
        _initialize(initialization_timeout=seconds, heartbeat_timeout_seconds=seconds)
        return None
    if coordinator_address is None or num_processes is None or process_id is None:
        raise LabError(
            "processes find each other by --coordinator-address HOST:PORT, --num-processes and "
            "--process-id together; or by --coordinator-address auto, on a cluster that JAX knows."
        )
    if not 0 <= process_id < num_processes:
        raise LabError(f"--process-id of {num_processes} is 0 to {num_processes - 1}, not {process_id}.")
    address = peers.split(coordinator_address)
    here = peers.Peers(process_id, num_processes, timeout)
    if process_id == 0:
        host, port = address[0], here.gather(address)
    else:
        relay = peers.Relay((address[0], here.come(address)), timeout)
        host, port = "127.0.0.1", relay.port
    _initialize(
        coordinator_address=f"{host}:{port}",
        coordinator_bind_address=f"{host}:{port}" if peers.is_loopback(host) else None,
        num_processes=num_processes,
        process_id=process_id,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=JAX_PATIENCE * seconds,
    )
    return here


def _initialize(**options: Any) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise LabError(f"the processes have not found each other: {reason}") from error


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def from_first(choose: Callable[[], int]) -> int:
    """A number that the first process chooses, in all processes."""
    chosen = choose() if is_first() else 0
    if jax.process_count() > 1:
        chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
    return chosen


def wait_for_others(what: str) -> None:
    """Waits until all processes have come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def check_same(what: str, digest: str) -> None:
    """Raises an error if `digest` is not the same in all processes."""
    if jax.process_count() > 1:
        number = np.uint32(int(digest[:8], 16))
        found = np.ravel(multihost_utils.process_allgather(number))
        if others := [str(i) for i, x in enumerate(found) if x != found[0]]:
            raise LabError(
                f"process {', '.join(others)} has {what} that differ from those of process 0. Start all "
                "processes with the same options and the same files."
            )


@contextlib.contextmanager
def together(here: Peers | None) -> Iterator[None]:
    """An error inside this context ends one of several processes at once, and tells the others.

    Without it the process would wait for the others at its end, while they wait for its part of a
    result.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        line = "interrupted" if isinstance(error, KeyboardInterrupt) else in_one_line(error)
        if here is not None:
            if line is None and isinstance(error, jax.errors.JaxRuntimeError):
                # Another process may have ended in the midst of a collective operation. Its end is then
                # the reason, and `here` is about to tell it and to end this process.
                time.sleep(here.timeout + 1)
            here.fail(line or f"{type(error).__name__} (its own output says where)")
        if line is None:
            traceback.print_exc()
            line = f"{type(error).__name__}, see above"
        end(f"error: {line}")
    if here is not None:
        here.leave()
