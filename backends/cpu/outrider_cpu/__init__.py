"""The reference backend ``cpu``: it executes each operation of the backend interface at once on the host."""
