"""Stream messages of workers and clients as events, straight from the bytes.

Owns the schemas of the messages that come once per task; no dict is made for them. Each
is checked against its exact field set before an event is made of it (B1.4). All other
messages go, as bytes, to a callable that the shell gave. Opens no payload, keeps no
reference to a frame. Called by the shell with each complete message of a stream.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from cython_ext.entities cimport Worker
from cython_ext.events cimport (
    DataReleased,
    Event,
    KeysAdded,
    KeysReleased,
    LongRunning,
    RescheduleAsked,
    StealAnswered,
    TaskFinished,
    WhoHasAsked,
)
from cython_ext.msgpack cimport (
    K_ARRAY,
    K_BIN,
    K_INT,
    K_MAP,
    K_NIL,
    K_STR,
    K_UINT,
    Header,
    PyBytes_FromStringAndSize,
    Reader,
    fail_kind,
    make_str,
    read_header,
    read_int,
    read_key,
    read_key_list,
    read_number,
    read_str,
    skip_value,
)

import msgpack

from cython_ext.msgpack import MsgpackError

__all__ = ["ClientStreamDecoder", "MsgpackError", "StreamDecoder", "WorkerStreamDecoder"]

cdef enum:
    F_OP
    F_KEY
    F_KEYS
    F_TYPE
    F_STATE
    F_RUN_ID
    F_NBYTES
    F_THREAD
    F_STATUS
    F_CLIENT
    F_TYPENAME
    F_METADATA
    F_STARTSTOPS
    F_STIMULUS_ID
    F_COMPUTE_DURATION

cdef tuple FIELD_NAMES = (
    "op",
    "key",
    "keys",
    "type",
    "state",
    "run_id",
    "nbytes",
    "thread",
    "status",
    "client",
    "typename",
    "metadata",
    "startstops",
    "stimulus_id",
    "compute_duration",
)

cdef enum:
    OP_COLD = -1
    OP_TASK_FINISHED = 0
    OP_ADD_KEYS
    OP_RELEASE_WORKER_DATA
    OP_LONG_RUNNING
    OP_RESCHEDULE
    OP_STEAL_RESPONSE
    OP_REQUEST_REFRESH_WHO_HAS
    OP_CLIENT_RELEASES_KEYS

cdef tuple OP_NAMES = (
    "task-finished",
    "add-keys",
    "release-worker-data",
    "long-running",
    "reschedule",
    "steal-response",
    "request-refresh-who-has",
    "client-releases-keys",
)

cdef enum:
    COMMON = (1 << F_OP) | (1 << F_STIMULUS_ID)

cdef uint32_t[N_HOT_OPS] REQUIRED = [
    COMMON
    | (1 << F_KEY)
    | (1 << F_RUN_ID)
    | (1 << F_NBYTES)
    | (1 << F_TYPE)
    | (1 << F_TYPENAME)
    | (1 << F_METADATA)
    | (1 << F_THREAD)
    | (1 << F_STARTSTOPS)
    | (1 << F_STATUS),
    COMMON | (1 << F_KEYS),
    COMMON | (1 << F_KEY),
    COMMON | (1 << F_KEY) | (1 << F_RUN_ID) | (1 << F_COMPUTE_DURATION),
    COMMON | (1 << F_KEY),
    COMMON | (1 << F_KEY) | (1 << F_STATE),
    COMMON | (1 << F_KEYS),
    (1 << F_OP) | (1 << F_KEYS),
]
cdef uint32_t[N_HOT_OPS] OPTIONAL = [0, 0, 0, 0, 0, 0, 0, 1 << F_CLIENT]

cdef enum:
    # An element from this size on goes to ``cold`` as a view: copying a graph costs too much.
    VIEW_FROM = 65536
    INTERN_SLOTS = 256
    INTERN_LIMIT = 1024
    INTERN_MAX_BYTES = 16384


cdef inline bint same(const uint8_t* p, const char* text, Py_ssize_t n) noexcept:
    return memcmp(p, text, n) == 0


cdef int field_of(const uint8_t* p, Py_ssize_t n) noexcept:
    # The field of that name, or -1.
    if n == 2:
        return F_OP if same(p, b"op", 2) else -1
    if n == 3:
        return F_KEY if same(p, b"key", 3) else -1
    if n == 4:
        if same(p, b"keys", 4):
            return F_KEYS
        return F_TYPE if same(p, b"type", 4) else -1
    if n == 5:
        return F_STATE if same(p, b"state", 5) else -1
    if n == 6:
        if same(p, b"run_id", 6):
            return F_RUN_ID
        if same(p, b"nbytes", 6):
            return F_NBYTES
        if same(p, b"thread", 6):
            return F_THREAD
        if same(p, b"status", 6):
            return F_STATUS
        return F_CLIENT if same(p, b"client", 6) else -1
    if n == 8:
        if same(p, b"typename", 8):
            return F_TYPENAME
        return F_METADATA if same(p, b"metadata", 8) else -1
    if n == 10:
        return F_STARTSTOPS if same(p, b"startstops", 10) else -1
    if n == 11:
        return F_STIMULUS_ID if same(p, b"stimulus_id", 11) else -1
    if n == 16:
        return F_COMPUTE_DURATION if same(p, b"compute_duration", 16) else -1
    return -1


cdef int scan_fields(Reader* r, uint64_t n, Scan* scan) except -1:
    """Note where each of the ``n`` fields at ``r`` is; all are passed."""
    cdef Header h
    cdef const uint8_t* name
    cdef uint32_t bit
    cdef int field
    cdef uint64_t i
    memset(scan, 0, sizeof(Scan))
    for i in range(n):
        name = r.p
        read_header(r, &h)
        if h.kind == K_STR:
            field = field_of(r.p, <Py_ssize_t>h.n)
            r.p += h.n
        else:
            field = -1
            r.p = name
            skip_value(r)
        if field < 0:
            if scan.surplus == NULL:
                scan.surplus = name
        else:
            bit = 1 << field
            if scan.seen & bit:
                scan.twice |= bit
            scan.seen |= bit
            scan.values[field] = r.p
        skip_value(r)
    scan.end = r.p
    return 0


cdef Reader reader_at(Scan* scan, int field) noexcept:
    cdef Reader r
    scan.field = field
    r.p = scan.values[field]
    r.end = scan.end
    return r


cdef str names_of(uint32_t fields):
    return ", ".join([repr(name) for i, name in enumerate(FIELD_NAMES) if fields >> i & 1])


cdef str misfit(Scan* scan, uint32_t required, uint32_t optional):
    """Why the fields are not the ones of the schema, or None."""
    cdef uint32_t missing = required & ~scan.seen
    cdef uint32_t surplus = scan.seen & ~(required | optional)
    cdef Reader r
    if missing:
        return f"missing field {names_of(missing)}"
    if surplus:
        return f"unexpected field {names_of(surplus)}"
    if scan.surplus != NULL:
        r.p = scan.surplus
        r.end = scan.end
        try:
            return f"unexpected field {read_key(&r)!r:.100}"
        except MsgpackError:
            return "unexpected field whose name is no string"
    if scan.twice:
        return f"field {names_of(scan.twice)} occurs twice"
    return None


cdef class Interner:
    """Makes equal values one object: a small cache by hash before a bounded dict."""

    def __cinit__(self, bint text):
        self.text = text
        self.slots = [None] * INTERN_SLOTS
        self.known = {}

    cdef object intern(self, const uint8_t* p, Py_ssize_t n):
        cdef uint64_t mixed = <uint64_t>n
        cdef uint64_t word
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t slot
        cdef Py_ssize_t size = 0
        cdef const char* data
        cdef object found
        if n > INTERN_MAX_BYTES:
            return make_str(p, n) if self.text else PyBytes_FromStringAndSize(<const char*>p, n)
        while i < n:
            word = 0
            memcpy(&word, p + i, min(n - i, 8))
            mixed = (mixed ^ word) * <uint64_t>0x9E3779B97F4A7C15
            mixed ^= mixed >> 29
            i += 8
        slot = <Py_ssize_t>(mixed & (INTERN_SLOTS - 1))
        found = self.slots[slot]
        if found is not None:
            if self.text:
                data = PyUnicode_AsUTF8AndSize(found, &size)
            else:
                data = <bytes>found
                size = len(<bytes>found)
            if size == n and memcmp(data, p, n) == 0:
                return found
        if self.text:
            found = make_str(p, n)
        else:
            found = PyBytes_FromStringAndSize(<const char*>p, n)
        if len(self.known) >= INTERN_LIMIT:
            self.known.clear()
        found = self.known.setdefault(found, found)
        self.slots[slot] = found
        return found


class _NotPlain(Exception):
    pass


def _plain_map(found):
    # Object hook of msgpack: metadata with closed values in it is kept as bytes.
    if "__Serialized__" in found or "__Pickled__" in found or "__Enum__" in found:
        raise _NotPlain
    if "__Set__" in found and "as-list" in found:
        return set(found["as-list"])
    return found


cdef object read_metadata(Reader* r):
    """The metadata map: None when empty, plain values, or its bytes when it is not plain."""
    cdef Header h
    cdef const uint8_t* start = r.p
    read_header(r, &h)
    if h.kind != K_MAP:
        fail_kind("a map", h.kind)
    if h.n == 0:
        return None
    r.p = start
    skip_value(r)
    raw = PyBytes_FromStringAndSize(<const char*>start, r.p - start)
    try:
        return msgpack.unpackb(raw, object_hook=_plain_map, use_list=False, strict_map_key=False)
    except _NotPlain:
        return raw
    except (ValueError, TypeError, OverflowError) as error:
        raise MsgpackError(f"not a map of plain values: {error}") from error


cdef int read_times(Reader* r, TaskFinished event) except -1:
    """Sum up the start-stops list at ``r`` into ``event``. Entries may have further fields."""
    cdef Header h
    cdef Header name
    cdef Header action
    cdef const uint8_t* name_start
    cdef const uint8_t* action_start
    cdef uint64_t n_entries
    cdef uint64_t n_fields
    cdef uint64_t i
    cdef uint64_t j
    cdef double start
    cdef double stop
    cdef int found
    read_header(r, &h)
    if h.kind != K_ARRAY:
        fail_kind("a list", h.kind)
    n_entries = h.n
    for i in range(n_entries):
        read_header(r, &h)
        if h.kind != K_MAP:
            fail_kind("a map in the list", h.kind)
        n_fields = h.n
        found = 0
        start = 0.0
        stop = 0.0
        action_start = NULL
        action.n = 0
        for j in range(n_fields):
            name_start = r.p
            read_header(r, &name)
            if name.kind != K_STR:
                r.p = name_start
                skip_value(r)
                skip_value(r)
                continue
            name_start = r.p
            r.p += name.n
            if name.n == 6 and same(name_start, b"action", 6):
                read_header(r, &action)
                if action.kind != K_STR:
                    fail_kind("a string as action", action.kind)
                action_start = r.p
                r.p += action.n
                found |= 1
            elif name.n == 5 and same(name_start, b"start", 5):
                start = read_number(r)
                found |= 2
            elif name.n == 4 and same(name_start, b"stop", 4):
                stop = read_number(r)
                found |= 4
            else:
                skip_value(r)
        if found != 7:
            raise MsgpackError("an entry needs action, start and stop")
        if not isfinite(start) or not isfinite(stop):
            raise MsgpackError("start and stop must be finite")
        if action.n == 7 and same(action_start, b"compute", 7):
            if not event.has_compute:
                event.has_compute = True
                event.compute_start = start
                event.compute_stop = stop
            event.compute_seconds += max(0.0, stop - start)
        elif action.n == 8 and same(action_start, b"transfer", 8):
            event.transfer_seconds += max(0.0, stop - start)
    return 0


cdef class StreamDecoder:
    """Base of the two decoders.

    ``handle(event)`` takes each event of a hot message at once, in the order of the stream.
    ``cold(element, frames, sender, now)`` takes each other message: its own msgpack (bytes, or
    a memoryview of the frame if it is large) and all frames, to which placeholders refer.
    ``rejected(sender, op, keys, reason, now, stimulus_id)`` takes each message that does not
    fit: the keys it names and what is wrong with it. What these raise passes through.
    """

    def __cinit__(self, handle, cold, rejected):
        self.handle = handle
        self.cold = cold
        self.rejected = rejected
        self.keep_startstops = False
        self.types = Interner(False)
        self.typenames = Interner(True)

    @property
    def counts(self):
        """dict[str, int]: messages that became events, by op."""
        return {OP_NAMES[i]: self.n_hot[i] for i in range(N_HOT_OPS) if self.n_hot[i]}

    cdef int _run(self, object frames, object sender, double now, str stimulus_id) except -1:
        cdef Py_buffer view
        cdef Reader r
        cdef Header h
        cdef Scan scan
        cdef const uint8_t* start
        cdef uint64_t n
        cdef uint64_t i
        if len(frames) == 0:
            raise MsgpackError("a stream message has no frames")
        PyObject_GetBuffer(frames[0], &view, PyBUF_SIMPLE)
        try:
            r.p = <const uint8_t*>view.buf
            r.end = r.p + view.len
            start = r.p
            read_header(&r, &h)
            if h.kind == K_ARRAY:
                n = h.n
            else:
                n = 1
                r.p = start
            for i in range(n):
                start = r.p
                read_header(&r, &h)
                if h.kind == K_MAP:
                    scan_fields(&r, h.n, &scan)
                    self._message(
                        &scan, start, <const uint8_t*>view.buf, frames, sender, now, stimulus_id
                    )
                    continue
                if h.kind == K_STR and h.n == 2 and same(r.p, b"OK", 2):
                    return 0
                r.p = start
                skip_value(&r)
                memset(&scan, 0, sizeof(Scan))
                self._reject(
                    &scan, sender, "", "a stream message must be a map", now, stimulus_id
                )
            if r.p != r.end:
                raise MsgpackError(f"{r.end - r.p} bytes follow the stream message")
        finally:
            PyBuffer_Release(&view)
        return 0

    cdef int _message(
        self,
        Scan* scan,
        const uint8_t* start,
        const uint8_t* body,
        object frames,
        object sender,
        double now,
        str stimulus_id,
    ) except -1:
        cdef Reader r
        cdef Header h
        cdef Event event = None
        cdef str reason
        cdef int op
        if not scan.seen & (1 << F_OP):
            return self._reject(scan, sender, "", "missing field 'op'", now, stimulus_id)
        r = reader_at(scan, F_OP)
        read_header(&r, &h)
        if h.kind != K_STR:
            return self._reject(
                scan, sender, "", "field 'op': expected a string", now, stimulus_id
            )
        op = self._hot_op(r.p, <Py_ssize_t>h.n)
        if op == OP_COLD:
            self.n_cold += 1
            if scan.end - start < VIEW_FROM:
                element = PyBytes_FromStringAndSize(<const char*>start, scan.end - start)
            else:
                element = memoryview(frames[0])[start - body : scan.end - body]
            self.cold(element, frames, sender, now)
            return 0
        if (
            scan.surplus != NULL
            or scan.twice
            or (scan.seen | OPTIONAL[op]) != (REQUIRED[op] | OPTIONAL[op])
        ):
            reason = misfit(scan, REQUIRED[op], OPTIONAL[op])
            return self._reject(scan, sender, OP_NAMES[op], reason, now, stimulus_id)
        try:
            event = self._event(op, scan, sender, now, stimulus_id)
        except MsgpackError as error:
            reason = f"field {FIELD_NAMES[scan.field]!r}: {error}"
            return self._reject(scan, sender, OP_NAMES[op], reason, now, stimulus_id)
        self.n_hot[op] += 1
        self.handle(event)
        return 0

    cdef int _reject(
        self, Scan* scan, object sender, str op, str reason, double now, str stimulus_id
    ) except -1:
        cdef Reader r
        cdef list keys = []
        if scan.seen & (1 << F_KEY):
            r = reader_at(scan, F_KEY)
            try:
                keys.append(read_key(&r))
            except MsgpackError:
                # What cannot be read names no key.
                pass
        if scan.seen & (1 << F_KEYS):
            r = reader_at(scan, F_KEYS)
            try:
                keys.extend(read_key_list(&r))
            except MsgpackError:
                pass
        if scan.seen & (1 << F_STIMULUS_ID):
            r = reader_at(scan, F_STIMULUS_ID)
            try:
                stimulus_id = read_str(&r)
            except MsgpackError:
                pass
        self.n_rejected += 1
        self.rejected(sender, op, keys, reason, now, stimulus_id)
        return 0

    cdef int _hot_op(self, const uint8_t* name, Py_ssize_t n) noexcept:
        return OP_COLD

    cdef Event _event(self, int op, Scan* scan, object sender, double now, str stimulus_id):
        raise NotImplementedError("_event")


cdef class WorkerStreamDecoder(StreamDecoder):
    """Decodes the stream of a worker; the sender that callables are given is its Worker."""

    def decode(self, frames, Worker worker, double now):
        """Handle one message of the stream: ``frames`` as cut, ``now`` in seconds.

        Raises MsgpackError when the body is no msgpack array of maps (or one map); what
        stands before the damage has been handled then.
        """
        self._run(frames, worker, now, "")

    cdef int _hot_op(self, const uint8_t* name, Py_ssize_t n) noexcept:
        if n == 13 and same(name, b"task-finished", 13):
            return OP_TASK_FINISHED
        if n == 8 and same(name, b"add-keys", 8):
            return OP_ADD_KEYS
        if n == 19 and same(name, b"release-worker-data", 19):
            return OP_RELEASE_WORKER_DATA
        if n == 12 and same(name, b"long-running", 12):
            return OP_LONG_RUNNING
        if n == 10 and same(name, b"reschedule", 10):
            return OP_RESCHEDULE
        if n == 14 and same(name, b"steal-response", 14):
            return OP_STEAL_RESPONSE
        if n == 23 and same(name, b"request-refresh-who-has", 23):
            return OP_REQUEST_REFRESH_WHO_HAS
        return OP_COLD

    cdef Event _event(self, int op, Scan* scan, object sender, double now, str stimulus_id):
        cdef Reader r
        cdef Header h
        cdef Event event
        cdef KeysAdded added
        cdef DataReleased released
        cdef LongRunning long_running
        cdef RescheduleAsked reschedule
        cdef StealAnswered answer
        cdef WhoHasAsked asked
        if op == OP_TASK_FINISHED:
            event = self._task_finished(scan, sender)
        elif op == OP_ADD_KEYS:
            added = KeysAdded.__new__(KeysAdded)
            added.worker = <Worker>sender
            r = reader_at(scan, F_KEYS)
            added.keys = read_key_list(&r)
            event = added
        elif op == OP_RELEASE_WORKER_DATA:
            released = DataReleased.__new__(DataReleased)
            released.worker = <Worker>sender
            r = reader_at(scan, F_KEY)
            released.key = read_key(&r)
            event = released
        elif op == OP_LONG_RUNNING:
            long_running = LongRunning.__new__(LongRunning)
            long_running.worker = <Worker>sender
            r = reader_at(scan, F_KEY)
            long_running.key = read_key(&r)
            r = reader_at(scan, F_RUN_ID)
            long_running.run_id = read_int(&r)
            long_running.compute_duration = -1.0
            r = reader_at(scan, F_COMPUTE_DURATION)
            if r.p[0] != 0xc0:
                long_running.compute_duration = read_number(&r)
                if not isfinite(long_running.compute_duration):
                    raise MsgpackError("must be finite")
            event = long_running
        elif op == OP_RESCHEDULE:
            reschedule = RescheduleAsked.__new__(RescheduleAsked)
            reschedule.worker = <Worker>sender
            r = reader_at(scan, F_KEY)
            reschedule.key = read_key(&r)
            event = reschedule
        elif op == OP_STEAL_RESPONSE:
            answer = StealAnswered.__new__(StealAnswered)
            answer.worker = <Worker>sender
            r = reader_at(scan, F_KEY)
            answer.key = read_key(&r)
            r = reader_at(scan, F_STATE)
            if r.p[0] != 0xc0:
                answer.state = read_str(&r)
            event = answer
        else:
            asked = WhoHasAsked.__new__(WhoHasAsked)
            asked.worker = <Worker>sender
            r = reader_at(scan, F_KEYS)
            asked.keys = read_key_list(&r)
            event = asked
        event.now = now
        r = reader_at(scan, F_STIMULUS_ID)
        event.stimulus_id = read_str(&r)
        return event

    cdef Event _task_finished(self, Scan* scan, object sender):
        cdef TaskFinished event = TaskFinished.__new__(TaskFinished)
        cdef Reader r
        cdef Header h
        cdef const uint8_t* raw
        event.worker = <Worker>sender
        r = reader_at(scan, F_KEY)
        event.key = read_key(&r)
        r = reader_at(scan, F_RUN_ID)
        event.run_id = read_int(&r)
        r = reader_at(scan, F_NBYTES)
        event.nbytes = read_int(&r)
        if event.nbytes < 0:
            raise MsgpackError("must not be negative")
        r = reader_at(scan, F_TYPE)
        read_header(&r, &h)
        if h.kind != K_BIN:
            fail_kind("bytes", h.kind)
        event.type = <bytes>self.types.intern(r.p, <Py_ssize_t>h.n)
        r = reader_at(scan, F_TYPENAME)
        read_header(&r, &h)
        if h.kind != K_STR:
            fail_kind("a string", h.kind)
        event.typename = <str>self.typenames.intern(r.p, <Py_ssize_t>h.n)
        r = reader_at(scan, F_METADATA)
        event.metadata = read_metadata(&r)
        r = reader_at(scan, F_THREAD)
        read_header(&r, &h)
        if h.kind == K_INT:
            event.thread = h.i
        elif h.kind == K_UINT:
            event.thread = h.n
        elif h.kind != K_NIL:
            fail_kind("an integer or nil", h.kind)
        r = reader_at(scan, F_STARTSTOPS)
        raw = r.p
        read_times(&r, event)
        if self.keep_startstops:
            event.startstops = PyBytes_FromStringAndSize(<const char*>raw, r.p - raw)
        r = reader_at(scan, F_STATUS)
        read_header(&r, &h)
        if h.kind != K_STR or h.n != 2 or not same(r.p, b"OK", 2):
            raise MsgpackError("expected 'OK'")
        return event


cdef class ClientStreamDecoder(StreamDecoder):
    """Decodes the stream of a client; the sender that callables are given is its id."""

    def decode(self, frames, str client_id not None, double now, str stimulus_id not None):
        """Handle one message of the stream: ``frames`` as cut, ``now`` in seconds.

        Messages of clients carry no stimulus id: events get ``stimulus_id``. A message may name
        another client than the one of the stream. Raises MsgpackError when the body is no
        msgpack array of maps (or one map); what stands before the damage has been handled then.
        """
        self._run(frames, client_id, now, stimulus_id)

    cdef int _hot_op(self, const uint8_t* name, Py_ssize_t n) noexcept:
        if n == 20 and same(name, b"client-releases-keys", 20):
            return OP_CLIENT_RELEASES_KEYS
        return OP_COLD

    cdef Event _event(self, int op, Scan* scan, object sender, double now, str stimulus_id):
        cdef KeysReleased event = KeysReleased.__new__(KeysReleased)
        cdef Reader r
        event.now = now
        event.stimulus_id = stimulus_id
        event.client_id = <str>sender
        if scan.seen & (1 << F_CLIENT):
            r = reader_at(scan, F_CLIENT)
            event.client_id = read_str(&r)
        r = reader_at(scan, F_KEYS)
        event.keys = read_key_list(&r)
        return event
