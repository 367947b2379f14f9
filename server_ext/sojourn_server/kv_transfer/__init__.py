"""Moves KV between engines, and between engines and their shared store, while the engines compute.

Theory of operation
===================

The package may import ``kv_offload``, but neither torch nor vLLM. It has two halves.

**Jobs** (``transfer_request``, ``transfer_jobs``, ``transfer_planner``, ``rank_transfers``,
``transfer_worker``, ``block_saver``). The planner, beside vLLM's scheduler, decides which transfers a
request needs. It gives each step's jobs to the workers, and gets their results with a later step.

**Transfers** (``transfer_manager`` and the modules below). A worker has one ``TransferManager``: a
thread with an event loop, in which a ``TransferNode`` runs, and ``store_threads``. Each transfer is one
coroutine a side::

    engine that computes the prompt (P)          engine that decodes it (D)

    BlockLoad.run                                IncomingPrompt.run
      lease buffers                                first message, or ``expect``
      read from storage;                           Read ──▶ lease buffers for the whole prompt
      or Read ──────────────────────────────▶               read from storage
         Data, layer by layer  ◀────────────                send layers, or Failed from some block on
      report layers; keep the blocks until ``end``
    BlockPush.run                                  Offer ──▶ take the rest of the lease, or a new one
      Offer ────────────────────────────────▶
      Need  ◀────────────────────────────────              Need the blocks that neither storage nor another
      Data, each layer once computed ───────▶               push brings; wait for all
      Complete ◀─────────────────────────────              Complete; keep the blocks until ``end``

A transfer of this package and the class that runs it are the same object. Its coroutine and all state belong
to the event loop. The engine's threads use it as a handle: they read its outcome, wait for it under the lock
``TransferNode.changed``, and ``post`` everything else to the loop.

These rules make the rest short:

1. *A slot has one filler.* ``BufferSlot.filler`` is the transfer, or the storage reads, that brings the
   block; all leases on the block wait for that one. Whatever ends sets the fillers of its missing slots
   to ``None`` and wakes those who wait. So a waiting coroutine looks at the slot again: it has the
   layer, or another filler, or may bring the block itself. A slot that is half filled, or that a thread
   may still write to, is ``bad``: its block is given up, and a new lease gets another slot.
2. *Blocks are awaited in order*, block after block within layer after layer, because only leading blocks
   are of use. No counters of missing blocks are kept.
3. *A transfer ends in one place*, ``Transfer._live``: well, by an exception, by ``asyncio.timeout``, or
   by ``stop``, which cancels the coroutine and keeps the reason. After that its outcome is set, its peer
   is told unless the peer is the cause, and its buffers are released. A message that is being sent is
   completed before that, because it reads the memory.
4. *Time is limited without progress, not in all.* ``patience`` is an ``asyncio.timeout``, and ``renew``
   starts it again: with each layer, with each report of a peer whose counter has grown, and, while the
   transfer waits for this engine's own buffers, reads or sends, whenever any transfer of this engine has
   moved. ``TransferNode._beat`` reports the counter to peers. A write to a socket, a read from storage,
   a dial and a handshake have limits of their own.
5. *Queues are in order of arrival*: leases, reads from storage, and the sends of one connection
   (``PeerConnection.lane``), because if all are served at once, all end late.

Nothing of a transfer survives either process. A peer's end closes its connections, and ``lost`` ends the
transfers on them. ``tests/kv_transfer`` runs two nodes in virtual time and kills one at every message.

In this package a lease is a transfer's reservation of buffers. It has nothing to do with the leases of
programs.
"""
