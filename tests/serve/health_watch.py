"""A process that requests ``/health`` every 10 ms: the work of the tests in their own process delays no measurement."""

import http.client
import select
import subprocess
import sys
import time

_REPORTED_S = 0.02


class HealthWatch:
    """Requests to ``/health`` during a block. After the block ``stalls`` has start and end of each slow answer."""

    def __init__(self, url):
        self.stalls, self.failed, self._url = [], [], url

    def __enter__(self):
        command = [sys.executable, __file__, self._url.removeprefix("http://")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "watching\n"
        return self

    def __exit__(self, *_):
        said, _ = self._process.communicate()
        assert self._process.returncode == 0
        for line in said.splitlines():
            status, began, ended = line.split()
            self.stalls.append((float(began), float(ended)))
            if status != "200":
                self.failed.append(status)

    def longest(self, began=float("-inf"), ended=float("inf")):
        """The longest time until an answer, in seconds, of the requests that overlap the given times."""
        return max((end - start for start, end in self.stalls if start < ended and end > began), default=0.0)


def main(address):
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/health")
    connection.getresponse().read()
    print("watching", flush=True)
    lines = []
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        began = time.monotonic()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        ended = time.monotonic()
        if answer.status != 200 or ended - began > _REPORTED_S:
            lines.append(f"{answer.status} {began} {ended}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
