"""Moves KV between engines, and between engines and their shared store, while the engines compute.

Theory of operation
===================

The package may import ``kv_offload``, but neither torch nor vLLM. It has two halves.

**Jobs** (``transfer_request``, ``transfer_jobs``, ``transfer_planner``, ``rank_transfers``,
``transfer_worker``). The planner, beside vLLM's scheduler, decides which transfers a
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
      Need  ◀────────────────────────────────              Need the blocks that storage does not bring
      Data, each layer once computed ───────▶               wait for all blocks
      Complete ◀─────────────────────────────              Complete; keep the blocks until ``end``

A transfer of this package and the class that runs it are the same object. Its coroutine and all state belong
to the event loop. The engine's threads use it as a handle: they read its outcome, wait for it under the lock
``TransferNode.changed``, and ``post`` everything else to the loop.

These rules make the rest short:

1. *Blocks are awaited in order*, block after block within layer after layer, because only leading blocks
   are of use. A coroutine that waits for ``news`` looks at its slots again: ``filled`` layers are there, and
   ``why`` says that the others will not arrive.
2. *A transfer ends in one place*, ``Transfer._end``: well, by an exception, or by ``stop``, which cancels the
   coroutine and keeps the reason. After that its outcome is set, its peer is told unless the peer is the
   cause, and its buffers are released. A message that is being sent is completed before that, because it
   reads the memory.
3. *Each wait has an end.* A peer that has a part in a transfer and does not answer pings loses its
   connection, and with it all transfers on it. A live peer has ``lease_s`` for each next piece of data, or
   ``patience_s`` if a step of the engine may wait for it, and four times ``lease_s`` to compute the rest of a
   prompt whose beginning was read for it. A read from storage, a dial and a handshake have limits of their
   own.
4. *Queues are in order of arrival*: leases, reads from storage, and the sends of one connection
   (``PeerConnection.lane``), because if all are served at once, all end late.

Nothing of a transfer survives either process. A peer's end closes its connections, and ``lost`` ends the
transfers on them. ``tests/kv_transfer`` runs two nodes in virtual time and kills one at every message.

In this package a lease is a transfer's reservation of buffers. It has nothing to do with the leases of
programs.
"""
