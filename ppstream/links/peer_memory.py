"""The ``peer`` link: GPUs of one host that reach each other's memory. No CPU on the path.

Bulk goes by the copy engine into a slot in the receiver's memory, and then the receiver's counter
is written: nothing of it takes a multiprocessor. A slot of ``PUT_BYTES`` or less, and any that
travels alone, is one kernel, which stores it there itself and then counts: several µs sooner.

The receiver waits for the counter in memory of its own. A stage's stream does so by a kernel that
spins on it, which takes half the time of the driver's wait. It takes nothing from that stage; while
A waits for its credit, C of an earlier envelope may run beside it, up to a quarter slower if it
fills the device. With ``spins = False`` all waits are the driver's: then an idle GPU shows idle,
and whoever shares it has all of it. There is no counter for credits:
the sender of envelope n waits for the receipt of result n - d_in (the loops'), which says more.

Memory is mapped by CUDA IPC, not by torch's symmetric memory: its rendezvous holds the
interpreter's lock, cannot be repeated with a new process, and needs a process group.

What faults of GPUs ask for, one by one:

1. *32 connections*: ``cuda/startup.py`` sets and checks it, and ``cuda/streams.py`` gives those
   that wait, and those that must move meanwhile, a connection each. At most two streams of a rank
   wait for a counter: the link's, on which only receipts are queued, and that of a stage that has
   nothing to do before the slot is there; or, of a lone envelope, A's and C's.
2. *Load and allocate first*: the kernels of sends and waits have run once before the link is open,
   and the loops run every stage on every slot before they queue a wait.
3. *No wait while idle*: kept where user code runs on the policy rank's host, or stage B takes a
   millisecond: receipts are queued at a doorbell (``device/policy_rank.py``), because a first
   load of a kernel stands behind any queued wait. A short stage B in a graph has receipts queued
   ahead: a doorbell for each would cost the 40 µs that this link saves. A kernel that waits is to
   others what a posted receive of NCCL is, and pauses between its reads when the wait is long.
4. *Release*: ``close`` writes far ahead into this rank's own counter, which ends either kind of
   wait, watches the stream move,
   tries a copy from the host next, and then says False: the process leaves with ``os._exit``.
5. *Death and silence* are noticed on the control socket, by the loops and the heartbeat.
6. *A send says nothing about the peer*: only results do, and they are what credits are made of.
7. *NCCL*: is another link.
8. *Order at the end*: the loop stops reading results (its run is over), ``close`` releases, waits
   with a limit for every stream that sends or waits, forgets the peer's addresses, and unmaps.
9. *Watchdog*: nothing here holds the interpreter's lock while it waits.
10. *Re-forming*: IPC handles go out after the memory is zeroed; a new policy process is a new
    generation with new memory. This end's memory is never freed while the process lives, because
    the peer may still be writing to it.
11. *Clocks*: ``device_clock.py``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from ppstream.core.errors import ProtocolError
from ppstream.cuda.driver import DeviceMemory, MappedMemory
from ppstream.links.device_counters import COUNTER_BYTES, CountedLink, CounterAddresses
from ppstream.links.device_link import device_slots, layouts, slot_count
from ppstream_kernels.cuda_put import Puts
from ppstream_kernels.cuda_stamped import StampedLaunches
from ppstream_kernels.cuda_wait import Waits

if TYPE_CHECKING:
    from ppstream.control.rendezvous import Store
    from ppstream.links.slots import LinkShape, Position

INLINE_BYTES: Final = 1 << 20  # of a slot that is sent between two stages: some 7 µs
PUT_BYTES: Final = 1 << 16  # of a slot; any where d_in = 1: there the way counts, not A beside it


class PeerLink(CountedLink):
    """Both hops of a rank (device_link.DeviceLink); all ranks must open them at the same time.

    Args:
        position: of this rank.
        store: where ranks leave word of their memory.
        shape: of both hops.
        device: of this rank; current, and CUDA has started.
        timeout_s: bound of the neighbours' coming.
        put_bytes: slots of this rank up to this size are sent by a kernel; None: ``PUT_BYTES``, or
            any where only one is ever under way.
        spins: streams of stages wait by a kernel.
        stamps: kernels of the link leave their times; with ``spins``, of slots sent by a kernel.

    Raises:
        PeerLostError: a neighbour did not open its end in time.
        DeviceError: the driver refuses memory or mapping.
        ProtocolError: the ends disagree on their sizes.
    """

    name = "peer"

    def __init__(
        self,
        position: Position,
        store: Store,
        shape: LinkShape,
        device: torch.device,
        timeout_s: float,
        *,
        put_bytes: int | None = None,
        spins: bool = True,
        stamps: bool = False,
    ) -> None:
        count = slot_count(shape)
        out, into = layouts(shape, position)
        mine = DeviceMemory(COUNTER_BYTES + count * into.slot_bytes)
        wanted = COUNTER_BYTES + count * out.slot_bytes
        self._theirs = _exchange(position, store, mine, wanted, timeout_s)
        places = CounterAddresses(
            my_counter=mine.address,
            their_counter=self._theirs.address,
            their_slots=self._theirs.address + COUNTER_BYTES,
        )
        slots = device_slots(mine.tensor(device)[COUNTER_BYTES:], into, count)
        most = put_bytes
        if most is None:  # a kernel sends a header that the host knows
            most = 0 if position.relays else put_limit(shape.d_in, out.slot_bytes, stamps=stamps)
        make_puts = partial(Puts, device) if out.slot_bytes <= most else None
        make_waits = partial(Waits, device) if spins else None
        make_stamped = partial(StampedLaunches, device) if stamps else None
        super().__init__(out, shape, device, slots, places, make_puts, make_waits, make_stamped)

    def close(self) -> bool:
        """Release, wait for every stream that was used, unmap; False when one does not move."""
        if not super().close():
            return False
        self._theirs.close()
        return True


def put_limit(d_in: int, slot_bytes: int, *, stamps: bool = False) -> int:
    """Bytes up to which slots of ``slot_bytes`` are sent by a kernel: a lone one always is.

    Where it stands in the stage's own stream, and with it the stage's times (``stamps``), it may
    take as long there as the two timing events that it replaces.
    """
    most = INLINE_BYTES if stamps else PUT_BYTES
    return most if d_in > 1 else max(most, slot_bytes)


def _exchange(
    position: Position, store: Store, mine: DeviceMemory, wanted: int, timeout_s: float
) -> MappedMemory:
    """Tell who sends here of ``mine``; map the next rank's memory, which must have ``wanted``."""
    store.set(f"peer/{position.place}", f"{mine.size} {mine.exported()}")
    size, _, exported = store.get(f"peer/{position.behind}", timeout_s).partition(" ")
    if int(size) != wanted:
        raise ProtocolError(
            f"the other end's slots take {size} bytes, this rank's layout has {wanted}: the ranks "
            "disagree on the policy's tensors or the queue bounds"
        )
    return MappedMemory(exported)
