"""What the scheduler measures of itself, and how it shows it.

``table`` lists every metric, ``counters`` and ``monitors`` hold what the server counts, and
``exporter`` turns it into text. Reads the scheduler's state and never changes it.
"""
