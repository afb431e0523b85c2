"""Effects as bytes on the way to peers.

Owns the shapes of the stream messages that the engine orders, and the outbox in which each
peer's messages wait for the next write. Field sets are exact: one field too many ends a
stock worker. Never opens a payload, never writes to a socket; keeps no reference to a
record. ``WireSink`` is called by the scheduler machine, ``Outbox`` by the shell, which
takes what is due.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from cython_ext.entities cimport F_ACTOR, Client, Edge, Replica, Task, TaskError, Worker
from cython_ext.graph cimport find_replica
from cython_ext.msgpack cimport (
    Buffer,
    PyBytes_FromStringAndSize,
    pack_array_header,
    pack_bin,
    pack_bool,
    pack_float,
    pack_int,
    pack_int_object,
    pack_key,
    pack_map_header,
    pack_nil,
    pack_number,
    pack_str,
    pack_uint,
    put,
    put_byte,
    put_bytes,
    release,
    reserve,
    store32,
)
from cython_ext.sink cimport Sink

__all__ = ["Outbox", "WireSink"]

cdef enum:
    # A sub-frame from this size on is sent from where it is; below it a copy is cheaper.
    LARGE_FRAME_BYTES = 65536
    # What an idle outbox may keep; there are as many as peers.
    KEEP_BYTES = 4096
    MAX_DEPTH = 500
    # Looking for the fetching worker among many holders must not cost O(workers).
    OWN_REPLICA_STEPS = 256

DEFAULT_MAX_HOLDERS = 32
DEFAULT_MAX_BODY_BYTES = 256 * 1024
DEFAULT_MAX_PAYLOAD_BYTES = 1024 * 1024
DEFAULT_MAX_FRAMES = 1000

cdef enum:
    OP_NONE = -1
    OP_COMPUTE_TASK = 0
    OP_FREE_KEYS
    OP_REMOVE_REPLICAS
    OP_ACQUIRE_REPLICAS
    OP_STEAL_REQUEST
    OP_REFRESH_WHO_HAS
    OP_WORKER_STATUS_CHANGE
    OP_REMOVE_WORKER
    OP_CLOSE
    OP_KEY_IN_MEMORY
    OP_TASK_ERRED
    OP_LOST_DATA
    OP_TASK_RETRIED
    OP_CANCELLED_KEYS
    OP_RESTART

cdef tuple OP_NAMES = (
    "compute-task",
    "free-keys",
    "remove-replicas",
    "acquire-replicas",
    "steal-request",
    "refresh-who-has",
    "worker-status-change",
    "remove-worker",
    "close",
    "key-in-memory",
    "task-erred",
    "lost-data",
    "task-retried",
    "cancelled-keys",
    "restart",
)


cdef bytes fragment(texts, Py_ssize_t n_fields=-1):
    """Constant part of a message: the strings ``texts``, behind a map head if asked for."""
    cdef Buffer b = Buffer(NULL, 0, 0)
    try:
        if n_fields >= 0:
            pack_map_header(&b, n_fields)
        for text in texts:
            pack_str(&b, text)
        return PyBytes_FromStringAndSize(<const char*>b.data, b.size)
    finally:
        release(&b)


cdef bytes COMPUTE_TASK = fragment(("op", "compute-task", "key"), 12)
cdef bytes FREE_KEYS = fragment(("op", "free-keys", "stimulus_id"), 3)
cdef bytes REMOVE_REPLICAS = fragment(("op", "remove-replicas", "stimulus_id"), 3)
cdef bytes ACQUIRE_REPLICAS = fragment(("op", "acquire-replicas", "who_has"), 4)
cdef bytes STEAL_REQUEST = fragment(("op", "steal-request", "key"), 3)
cdef bytes REFRESH_WHO_HAS = fragment(("op", "refresh-who-has", "who_has"), 3)
cdef bytes WORKER_STATUS_CHANGE = fragment(("op", "worker-status-change", "status"), 3)
cdef bytes REMOVE_WORKER = fragment(("op", "remove-worker", "worker"), 3)
cdef bytes CLOSE = fragment(("op", "close"), 1)
cdef bytes CLOSE_FOR = fragment(("op", "close", "reason"), 2)
cdef bytes KEY_IN_MEMORY = fragment(("op", "key-in-memory", "key"), 2)
cdef bytes KEY_IN_MEMORY_TYPED = fragment(("op", "key-in-memory", "key"), 3)
cdef bytes TASK_ERRED = fragment(("op", "task-erred", "key"), 4)
cdef bytes LOST_DATA = fragment(("op", "lost-data", "key"), 2)
cdef bytes TASK_RETRIED = fragment(("op", "task-retried", "key"), 2)
cdef bytes CANCELLED_KEYS = fragment(("op", "cancelled-keys", "keys"))
cdef bytes RESTART = fragment(("op", "restart"), 1)

cdef bytes RUN_ID = fragment(("run_id",))
# The head of a list of three numbers stands behind the name.
cdef bytes PRIORITY = fragment(("priority",)) + b"\x93"
cdef bytes WHO_HAS = fragment(("who_has",))
cdef bytes NBYTES = fragment(("nbytes",))
cdef bytes RESOURCE_RESTRICTIONS = fragment(("resource_restrictions",))
cdef bytes ACTOR = fragment(("actor",))
cdef bytes ANNOTATIONS = fragment(("annotations",))
# A span id of nil stands behind the name: we have no spans yet that workers could report to.
cdef bytes SPAN_ID_AND_STIMULUS_ID = (
    fragment(("span_id",)) + b"\xc0" + fragment(("stimulus_id",))
)
cdef bytes STIMULUS_ID = fragment(("stimulus_id",))
cdef bytes KEYS = fragment(("keys",))
cdef bytes TYPE = fragment(("type",))
cdef bytes EXCEPTION = fragment(("exception",))
cdef bytes TRACEBACK = fragment(("traceback",))
cdef bytes REASON = fragment(("reason",))
cdef bytes MSG = fragment(("msg",))
cdef str PICKLED = "__Pickled__"
cdef bytes PICKLED_PLACEHOLDER = fragment((PICKLED,), 1)
cdef bytes RUN_SPEC = fragment(("run_spec",)) + PICKLED_PLACEHOLDER
cdef bytes NO_INPUTS = WHO_HAS + b"\x80" + NBYTES + b"\x80"


@cython.final
cdef class Outbox:
    """Messages that wait for the next write to one peer, as bytes.

    Many messages (maps) make one wire message; a new wire message is begun at ``max_body_bytes``
    of maps, ``max_payload_bytes`` of sub-frames or ``max_frames`` sub-frames, so that a peer need
    not read everything before it sees anything. ``attached`` is the shell's, and not looked at.
    """

    def __cinit__(
        self,
        attached=None,
        *,
        Py_ssize_t max_body_bytes=DEFAULT_MAX_BODY_BYTES,
        Py_ssize_t max_payload_bytes=DEFAULT_MAX_PAYLOAD_BYTES,
        Py_ssize_t max_frames=DEFAULT_MAX_FRAMES,
    ):
        if max_body_bytes < 1 or max_payload_bytes < 1 or max_frames < 1:
            raise ValueError(
                "max_body_bytes, max_payload_bytes and max_frames must be positive, got "
                f"{max_body_bytes}, {max_payload_bytes}, {max_frames}"
            )
        self.attached = attached
        self.max_body_bytes = max_body_bytes
        self.max_payload_bytes = max_payload_bytes
        self.max_frames = max_frames
        self.large = []
        self.sealed = []
        self.merge_op = OP_NONE

    def __dealloc__(self):
        release(&self.body)
        release(&self.small)
        release(&self.lengths)

    @property
    def n_messages(self):
        """int: messages (maps) that wait."""
        return self.n_sealed_maps + self.n_maps

    @property
    def buffered_bytes(self):
        """int: bytes that wait, without the heads of the wire message that is still open."""
        return self.sealed_bytes + self.body_size + self.small_size + self.large_bytes

    def append_message(self, dict message not None):
        """Append one message that consists of plain values and closed payloads.

        A closed payload is an object with the attributes ``PLACEHOLDER`` (class; the name of its
        placeholder), ``header`` (bytes of the sub-header) and ``frames``; it gets a new number.
        With the PLACEHOLDER ``__Enum__`` it has ``module``, ``type_name`` and ``name`` instead.
        Raises TypeError or ValueError for a value that has no form on the wire; nothing is
        appended then.
        """
        self.begin()
        self.pack_value(message, 0)
        if self.counts is not None:
            op = message.get("op")
            self.counts[op] = self.counts.get(op, 0) + 1
        self.commit()

    def take(self):
        """list[bytes-like]: all that waits, to be written in this order; then nothing waits."""
        self.begin()
        if self.n_maps:
            self.seal()
        taken = self.sealed
        self.forget_sealed()
        return taken

    def clear(self):
        """Drop all that waits."""
        self.drop_open()
        self.forget_sealed()

    def __len__(self):
        return self.n_sealed_maps + self.n_maps

    def __bool__(self):
        return self.n_sealed_maps + self.n_maps > 0

    cdef int begin(self) except -1:
        """Start a map: drop what a map that failed half-way has left."""
        self.body.size = self.body_size
        self.small.size = self.small_size
        self.lengths.size = self.lengths_size
        if self.pending_large_bytes:
            del self.large[self.large_size :]
            self.pending_large_bytes = 0
        return 0

    cdef int commit(self) except -1:
        """The map is complete."""
        self.merge_op = OP_NONE
        self.n_maps += 1
        self.body_size = self.body.size
        self.small_size = self.small.size
        self.lengths_size = self.lengths.size
        if self.pending_large_bytes:
            self.large_size = len(self.large)
            self.large_bytes += self.pending_large_bytes
            self.pending_large_bytes = 0
        return self.mark()

    cdef int mark(self) except -1:
        """Tell the sink that something waits here, and close a wire message that is full."""
        if not self.is_marked and self.dirty is not None:
            self.dirty.append(self)
            self.is_marked = True
        if (
            self.body_size >= self.max_body_bytes
            or self.small_size + self.large_bytes >= self.max_payload_bytes
            or self.lengths_size >= 8 * self.max_frames
        ):
            self.seal()
        return 0

    cdef int seal(self) except -1:
        """Make a complete wire message of the open one."""
        cdef Buffer head = Buffer(NULL, 0, 0)
        cdef Py_ssize_t n_frames = self.lengths_size // 8
        cdef const int64_t* lengths = <const int64_t*>self.lengths.data
        # Sub-frames are numbered from 0 here; ``first`` is the first one that is not copied.
        cdef Py_ssize_t first = n_frames
        cdef Py_ssize_t start = 0
        cdef Py_ssize_t end
        cdef Py_ssize_t at
        cdef Py_ssize_t i
        cdef Py_ssize_t j
        cdef uint64_t block
        cdef list chunks = []
        cdef bytes chunk
        cdef char* data
        cdef uint8_t raw[8]
        if self.large_size:
            first = <Py_ssize_t>self.large[0]
        for i in range(first):
            start += lengths[i]
        try:
            # In front of everything: N0, the number of frames, their lengths; then the array head.
            reserve(&head, 8 * (n_frames + 3) + 5)
            head.size = 24
            put(&head, self.lengths.data, self.lengths_size)
            at = head.size
            pack_array_header(&head, self.n_maps)
            block = head.size - 8 + self.body_size + start
            store_little(head.data, block)
            store_little(head.data + 8, n_frames + 1)
            store_little(head.data + 16, head.size - at + self.body_size)
            for i in range(n_frames):
                store_little(raw, lengths[i])
                memcpy(head.data + 24 + 8 * i, raw, 8)
            chunk = PyBytes_FromStringAndSize(NULL, head.size + self.body_size + start)
            data = PyBytes_AS_STRING(chunk)
            memcpy(data, head.data, head.size)
            memcpy(data + head.size, self.body.data, self.body_size)
            if start:
                memcpy(data + head.size + self.body_size, self.small.data, start)
            self.sealed_bytes += head.size + self.body_size + self.small_size + self.large_bytes
        finally:
            release(&head)
        chunks.append(chunk)
        i = first
        for j in range(0, self.large_size, 2):
            end = start
            while i < <Py_ssize_t>self.large[j]:
                end += lengths[i]
                i += 1
            if end > start:
                chunks.append(
                    PyBytes_FromStringAndSize(<const char*>self.small.data + start, end - start)
                )
                start = end
            chunks.append(self.large[j + 1])
            i += 1
        if start < self.small_size:
            chunks.append(
                PyBytes_FromStringAndSize(
                    <const char*>self.small.data + start, self.small_size - start
                )
            )
        self.sealed.extend(chunks)
        self.n_sealed_maps += self.n_maps
        return self.drop_open()

    cdef int drop_open(self) except -1:
        """Empty the open wire message."""
        self.body_size = 0
        self.small_size = 0
        self.lengths_size = 0
        self.n_maps = 0
        self.merge_op = OP_NONE
        self.merge_stimulus_id = None
        self.body.size = 0
        self.small.size = 0
        self.lengths.size = 0
        if self.large:
            self.large = []
            self.large_size = 0
            self.large_bytes = 0
            self.pending_large_bytes = 0
        return 0

    cdef int forget_sealed(self) except -1:
        """Nothing waits any more: the state of an idle outbox."""
        self.sealed = []
        self.sealed_bytes = 0
        self.n_sealed_maps = 0
        if self.body.capacity > KEEP_BYTES:
            release(&self.body)
        if self.small.capacity > KEEP_BYTES:
            release(&self.small)
        if self.lengths.capacity > KEEP_BYTES:
            release(&self.lengths)
        return 0

    cdef int add_frame(self, object frame) except -1:
        cdef Py_buffer view
        cdef int64_t n
        if type(frame) is bytes:
            n = len(<bytes>frame)
            if n < LARGE_FRAME_BYTES:
                put(&self.lengths, &n, 8)
                return put_bytes(&self.small, <bytes>frame)
        else:
            PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
            try:
                n = view.len
                if n < LARGE_FRAME_BYTES:
                    put(&self.lengths, &n, 8)
                    return put(&self.small, view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
        self.large.append(self.lengths.size // 8)
        self.large.append(frame)
        self.pending_large_bytes += n
        return put(&self.lengths, &n, 8)

    cdef int pack_opaque(self, str placeholder, object header, object frames) except -1:
        """Put a placeholder into the body, and the sub-header and its frames behind."""
        if placeholder is PICKLED:
            put_bytes(&self.body, PICKLED_PLACEHOLDER)
        else:
            pack_map_header(&self.body, 1)
            pack_str(&self.body, placeholder)
        pack_uint(&self.body, self.lengths.size // 8 + 1)
        self.add_frame(header)
        for frame in frames:
            self.add_frame(frame)
        return 0

    cdef int pack_value(self, object value, int depth) except -1:
        cdef Buffer* b = &self.body
        if type(value) is str:
            return pack_str(b, <str>value)
        if value is None:
            return pack_nil(b)
        if type(value) is int:
            return pack_int_object(b, value)
        if type(value) is bool:
            return pack_bool(b, value)
        if type(value) is float:
            return pack_float(b, value)
        if depth > MAX_DEPTH:
            raise ValueError(f"message is nested deeper than {MAX_DEPTH} levels")
        if type(value) is dict:
            pack_map_header(b, len(<dict>value))
            for key, item in (<dict>value).items():
                self.pack_value(key, depth + 1)
                self.pack_value(item, depth + 1)
            return 0
        if type(value) is list or type(value) is tuple:
            pack_array_header(b, len(value))
            for item in value:
                self.pack_value(item, depth + 1)
            return 0
        return self.pack_other(value, depth)

    cdef int pack_other(self, object value, int depth) except -1:
        cdef Py_buffer view
        if isinstance(value, (bytes, bytearray, memoryview)):
            PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
            try:
                return pack_bin(&self.body, view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
        if isinstance(value, (set, frozenset)):
            return self.pack_value({"__Set__": True, "as-list": list(value)}, depth)
        placeholder = getattr(type(value), "PLACEHOLDER", None)
        if placeholder == "__Enum__":
            return self.pack_value(
                {
                    "__Enum__": True,
                    "name": value.name,
                    "__module__": value.module,
                    "__name__": value.type_name,
                },
                depth,
            )
        if placeholder is not None:
            return self.pack_opaque(placeholder, value.header, value.frames)
        # Subclasses travel as what they are derived from.
        if isinstance(value, str):
            return pack_str(&self.body, str.__str__(value))
        if isinstance(value, int):
            return pack_int_object(&self.body, int(value))
        if isinstance(value, float):
            return pack_float(&self.body, value)
        if isinstance(value, dict):
            return self.pack_value(dict(value), depth)
        if isinstance(value, (list, tuple)):
            return self.pack_value(list(value), depth)
        raise TypeError(f"{type(value).__name__} has no form on the wire: {value!r:.100}")

    cdef int add_key(self, int op, bytes head, object key, str stimulus_id) except -1:
        """Order for one key; it joins the last message if that is of the same op and cause."""
        cdef Buffer* b = &self.body
        self.begin()
        if self.merge_op == op and (
            self.merge_stimulus_id is stimulus_id or self.merge_stimulus_id == stimulus_id
        ):
            pack_key(b, key)
            self.merge_count += 1
            store32(b.data + self.merge_at + 1, self.merge_count)
            self.body_size = b.size
            self.mark()
            return 0
        put_bytes(b, head)
        pack_str(b, stimulus_id)
        put_bytes(b, KEYS)
        self.merge_at = b.size
        # Always the form with a count of four bytes: it is counted up in place.
        put_byte(b, 0xdd)
        put_byte(b, 0)
        put_byte(b, 0)
        put_byte(b, 0)
        put_byte(b, 1)
        pack_key(b, key)
        self.merge_op = OP_NONE
        self.commit()
        if self.n_maps:
            self.merge_op = op
            self.merge_count = 1
            self.merge_stimulus_id = stimulus_id
        return 1


cdef inline int store_little(uint8_t* p, uint64_t value) noexcept:
    cdef int i
    for i in range(8):
        p[i] = <uint8_t>(value >> (8 * i))
    return 0


cdef int pack_holders(
    Buffer* b, Task task, Worker fetching, Py_ssize_t max_holders
) except -1:
    """List of addresses that hold ``task``: all, or of many those at both ends of the list.

    Copies are added at its end: taking some of those spreads the load while a result spreads.
    """
    cdef Replica* replica = task.replicas_head
    cdef Replica* own = NULL
    cdef Py_ssize_t left = max_holders
    cdef Py_ssize_t first
    if task.n_replicas <= max_holders:
        pack_array_header(b, task.n_replicas)
        while replica != NULL:
            pack_str(b, (<Worker>replica.worker).address)
            replica = replica.task_next
        return 0
    pack_array_header(b, max_holders)
    if min(<int64_t>task.n_replicas, fetching.n_replicas) <= OWN_REPLICA_STEPS:
        own = find_replica(task, fetching)
    if own != NULL:
        pack_str(b, fetching.address)
        left -= 1
    first = left // 2
    left -= first
    while first > 0:
        if replica != own:
            pack_str(b, (<Worker>replica.worker).address)
            first -= 1
        replica = replica.task_next
    replica = task.replicas_tail
    while left > 0:
        if replica != own:
            pack_str(b, (<Worker>replica.worker).address)
            left -= 1
        replica = replica.task_prev
    return 0


cdef int pack_who_has(Buffer* b, dict who_has) except -1:
    pack_map_header(b, len(who_has))
    for key, addresses in who_has.items():
        pack_key(b, key)
        pack_array_header(b, len(addresses))
        for address in addresses:
            pack_str(b, address)
    return 0


cdef class WireSink(Sink):
    """Encodes each effect at once into the outbox of its peer.

    The outbox is ``Worker.peer`` or ``Client.peer``; None means that nothing is sent to that peer.
    ``max_holders`` bounds the addresses that a worker is told for one dependency.
    """

    def __cinit__(
        self,
        *,
        Py_ssize_t max_holders=DEFAULT_MAX_HOLDERS,
        Py_ssize_t max_body_bytes=DEFAULT_MAX_BODY_BYTES,
        Py_ssize_t max_payload_bytes=DEFAULT_MAX_PAYLOAD_BYTES,
        Py_ssize_t max_frames=DEFAULT_MAX_FRAMES,
    ):
        if max_holders < 1:
            raise ValueError(f"max_holders must be positive, got {max_holders}")
        self.dirty = []
        self.other_counts = {}
        self.max_holders = max_holders
        self.max_body_bytes = max_body_bytes
        self.max_payload_bytes = max_payload_bytes
        self.max_frames = max_frames

    def outbox(self, attached=None):
        """Outbox: a new one that reports to this sink when something waits in it."""
        cdef Outbox box = Outbox(
            attached,
            max_body_bytes=self.max_body_bytes,
            max_payload_bytes=self.max_payload_bytes,
            max_frames=self.max_frames,
        )
        box.dirty = self.dirty
        box.counts = self.other_counts
        return box

    def take_dirty(self):
        """list[Outbox]: those that something was put into since the last call, in that order."""
        cdef list taken = []
        cdef Outbox box
        for box in self.dirty:
            box.is_marked = False
            if box.n_maps or box.n_sealed_maps:
                taken.append(box)
        self.dirty.clear()
        return taken

    @property
    def counts(self):
        """dict[str, int]: messages made so far, by op."""
        counts = {OP_NAMES[i]: self.n_sent[i] for i in range(len(OP_NAMES)) if self.n_sent[i]}
        for op, count in self.other_counts.items():
            counts[op] = counts.get(op, 0) + count
        return counts

    cdef int pack_inputs(self, Buffer* b, Worker worker, Task task) except -1:
        cdef Task dependency
        cdef Py_ssize_t i
        put_bytes(b, WHO_HAS)
        pack_map_header(b, task.n_dependencies)
        for i in range(task.n_dependencies):
            dependency = <Task>task.edges[i].parent
            if dependency.n_replicas == 0:
                raise ValueError(
                    f"task {task.key!r} is sent before its input {dependency.key!r} is there"
                )
            pack_key(b, dependency.key)
            pack_holders(b, dependency, worker, self.max_holders)
        put_bytes(b, NBYTES)
        pack_map_header(b, task.n_dependencies)
        for i in range(task.n_dependencies):
            dependency = <Task>task.edges[i].parent
            pack_key(b, dependency.key)
            pack_int(b, max(<int64_t>0, dependency.nbytes))
        return 0

    cdef int compute_task(self, Worker worker, Task task, str stimulus_id) except -1:
        cdef Outbox box
        cdef Buffer* b
        cdef dict resources
        cdef object run_spec = task.run_spec
        if worker.peer is None:
            return 0
        if run_spec is None:
            raise ValueError(f"task {task.key!r} has no definition that could be sent")
        box = <Outbox?>worker.peer
        box.begin()
        b = &box.body
        put_bytes(b, COMPUTE_TASK)
        pack_key(b, task.key)
        put_bytes(b, RUN_ID)
        pack_int(b, task.run_id)
        put_bytes(b, PRIORITY)
        pack_number(b, -task.user_priority)
        pack_number(b, task.generation)
        pack_number(b, task.order)
        if task.n_dependencies == 0:
            put_bytes(b, NO_INPUTS)
        else:
            self.pack_inputs(b, worker, task)
        put_bytes(b, RUN_SPEC)
        pack_uint(b, box.lengths.size // 8 + 1)
        if type(run_spec) is bytes:
            box.add_frame(run_spec)
        else:
            for frame in run_spec:
                box.add_frame(frame)
        put_bytes(b, ACTOR)
        pack_bool(b, task.flags & F_ACTOR)
        put_bytes(b, RESOURCE_RESTRICTIONS)
        if task.annotations is None:
            pack_nil(b)
            put_bytes(b, ANNOTATIONS)
            pack_map_header(b, 0)
        else:
            resources = None
            if task.annotations.restrictions is not None:
                resources = task.annotations.restrictions.resources
            if resources:
                pack_map_header(b, len(resources))
                for name, amount in resources.items():
                    pack_str(b, name)
                    pack_number(b, amount)
            else:
                pack_nil(b)
            put_bytes(b, ANNOTATIONS)
            wire = task.annotations.wire
            if wire is None:
                pack_map_header(b, 0)
            elif type(wire) is bytes:
                put_bytes(b, <bytes>wire)
            else:
                # The whole map is one pickle: sub-header and buffers.
                box.pack_opaque(PICKLED, wire[0], wire[1:])
        put_bytes(b, SPAN_ID_AND_STIMULUS_ID)
        pack_str(b, stimulus_id)
        self.n_sent[OP_COMPUTE_TASK] += 1
        return box.commit()

    cdef int free_key(self, Worker worker, object key, str stimulus_id) except -1:
        if worker.peer is None:
            return 0
        self.n_sent[OP_FREE_KEYS] += (<Outbox?>worker.peer).add_key(
            OP_FREE_KEYS, FREE_KEYS, key, stimulus_id
        )
        return 0

    cdef int remove_replica(self, Worker worker, object key, str stimulus_id) except -1:
        if worker.peer is None:
            return 0
        self.n_sent[OP_REMOVE_REPLICAS] += (<Outbox?>worker.peer).add_key(
            OP_REMOVE_REPLICAS, REMOVE_REPLICAS, key, stimulus_id
        )
        return 0

    cdef int acquire_replicas(
        self, Worker worker, dict who_has, dict nbytes, str stimulus_id
    ) except -1:
        cdef Outbox box
        cdef Buffer* b
        if worker.peer is None:
            return 0
        box = <Outbox?>worker.peer
        box.begin()
        b = &box.body
        put_bytes(b, ACQUIRE_REPLICAS)
        pack_who_has(b, who_has)
        put_bytes(b, NBYTES)
        pack_map_header(b, len(nbytes))
        for key, size in nbytes.items():
            pack_key(b, key)
            pack_int(b, size)
        put_bytes(b, STIMULUS_ID)
        pack_str(b, stimulus_id)
        self.n_sent[OP_ACQUIRE_REPLICAS] += 1
        return box.commit()

    cdef int steal_request(self, Worker worker, object key, str stimulus_id) except -1:
        cdef Outbox box
        cdef Buffer* b
        if worker.peer is None:
            return 0
        box = <Outbox?>worker.peer
        box.begin()
        b = &box.body
        put_bytes(b, STEAL_REQUEST)
        pack_key(b, key)
        put_bytes(b, STIMULUS_ID)
        pack_str(b, stimulus_id)
        self.n_sent[OP_STEAL_REQUEST] += 1
        return box.commit()

    cdef int refresh_who_has(self, Worker worker, dict who_has, str stimulus_id) except -1:
        cdef Outbox box
        cdef Buffer* b
        if worker.peer is None:
            return 0
        box = <Outbox?>worker.peer
        box.begin()
        b = &box.body
        put_bytes(b, REFRESH_WHO_HAS)
        pack_who_has(b, who_has)
        put_bytes(b, STIMULUS_ID)
        pack_str(b, stimulus_id)
        self.n_sent[OP_REFRESH_WHO_HAS] += 1
        return box.commit()

    cdef int worker_status(self, Worker worker, str status, str stimulus_id) except -1:
        cdef Outbox box
        cdef Buffer* b
        if worker.peer is None:
            return 0
        box = <Outbox?>worker.peer
        box.begin()
        b = &box.body
        put_bytes(b, WORKER_STATUS_CHANGE)
        pack_str(b, status)
        put_bytes(b, STIMULUS_ID)
        pack_str(b, stimulus_id)
        self.n_sent[OP_WORKER_STATUS_CHANGE] += 1
        return box.commit()

    cdef int worker_removed(self, Worker worker, str address, str stimulus_id) except -1:
        cdef Outbox box
        cdef Buffer* b
        if worker.peer is None:
            return 0
        box = <Outbox?>worker.peer
        box.begin()
        b = &box.body
        put_bytes(b, REMOVE_WORKER)
        pack_str(b, address)
        put_bytes(b, STIMULUS_ID)
        pack_str(b, stimulus_id)
        self.n_sent[OP_REMOVE_WORKER] += 1
        return box.commit()

    cdef int close_worker(self, Worker worker, str reason) except -1:
        cdef Outbox box
        if worker.peer is None:
            return 0
        box = <Outbox?>worker.peer
        box.begin()
        if reason is None:
            put_bytes(&box.body, CLOSE)
        else:
            put_bytes(&box.body, CLOSE_FOR)
            pack_str(&box.body, reason)
        self.n_sent[OP_CLOSE] += 1
        return box.commit()

    cdef int key_in_memory(self, Client client, Task task) except -1:
        cdef Outbox box
        cdef Buffer* b
        cdef bytes pickled = None
        if client.peer is None:
            return 0
        box = <Outbox?>client.peer
        box.begin()
        b = &box.body
        if task.type_info is not None:
            pickled = task.type_info.pickled
        if pickled is None:
            put_bytes(b, KEY_IN_MEMORY)
            pack_key(b, task.key)
        else:
            put_bytes(b, KEY_IN_MEMORY_TYPED)
            pack_key(b, task.key)
            put_bytes(b, TYPE)
            pack_bin(b, <const char*>pickled, len(pickled))
        self.n_sent[OP_KEY_IN_MEMORY] += 1
        return box.commit()

    cdef int task_erred(self, Client client, object key, TaskError error) except -1:
        cdef Outbox box
        cdef Buffer* b
        if client.peer is None:
            return 0
        box = <Outbox?>client.peer
        box.begin()
        b = &box.body
        put_bytes(b, TASK_ERRED)
        pack_key(b, key)
        put_bytes(b, EXCEPTION)
        box.pack_value(error.exception, 0)
        put_bytes(b, TRACEBACK)
        box.pack_value(error.traceback, 0)
        self.n_sent[OP_TASK_ERRED] += 1
        return box.commit()

    cdef int lost_data(self, Client client, object key) except -1:
        cdef Outbox box
        if client.peer is None:
            return 0
        box = <Outbox?>client.peer
        box.begin()
        put_bytes(&box.body, LOST_DATA)
        pack_key(&box.body, key)
        self.n_sent[OP_LOST_DATA] += 1
        return box.commit()

    cdef int task_retried(self, Client client, object key) except -1:
        cdef Outbox box
        if client.peer is None:
            return 0
        box = <Outbox?>client.peer
        box.begin()
        put_bytes(&box.body, TASK_RETRIED)
        pack_key(&box.body, key)
        self.n_sent[OP_TASK_RETRIED] += 1
        return box.commit()

    cdef int cancelled_keys(
        self, Client client, list keys, str reason, str message
    ) except -1:
        cdef Outbox box
        cdef Buffer* b
        if client.peer is None:
            return 0
        box = <Outbox?>client.peer
        box.begin()
        b = &box.body
        pack_map_header(b, 2 + (reason is not None) + (message is not None))
        put_bytes(b, CANCELLED_KEYS)
        pack_array_header(b, len(keys))
        for key in keys:
            pack_key(b, key)
        if reason is not None:
            put_bytes(b, REASON)
            pack_str(b, reason)
        if message is not None:
            put_bytes(b, MSG)
            pack_str(b, message)
        self.n_sent[OP_CANCELLED_KEYS] += 1
        return box.commit()

    cdef int restarted(self, Client client) except -1:
        cdef Outbox box
        if client.peer is None:
            return 0
        box = <Outbox?>client.peer
        box.begin()
        put_bytes(&box.body, RESTART)
        self.n_sent[OP_RESTART] += 1
        return box.commit()
