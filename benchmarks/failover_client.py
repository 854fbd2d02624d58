"""What runs in the pods of the failover lab: a server, and a client that costs little."""

from __future__ import annotations

SERVER = """
import signal, socket, sys
server = socket.create_server(
    ("::", int(sys.argv[1])), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True
)
def hang(*_):
    server.listen(8)  # from now on eight connections wait, and others are dropped
    signal.pause()
signal.signal(signal.SIGUSR1, hang)
print("serving", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        try:
            connection.sendall(b"here")
        except OSError:
            pass
"""
"""Answers every connection on a port; hangs after SIGUSR1."""

CLIENT = """
import errno, json, select, socket, struct, sys, time
from collections import deque
targets, rate, seconds = json.loads(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address, _ in targets]
reset = struct.pack("ii", 1, 0)  # SO_LINGER: no TIME_WAIT
poll, waiting, order, found = select.epoll(), {}, deque(), []
began = following = time.time()
number = 0
def done(sock, at, target, outcome):
    found.append((round(at, 3), target, outcome, round(time.time() - at, 3)))
    sock.close()
def connect(target):
    sock = socket.socket(families[target], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    at = time.time()
    error = sock.connect_ex(tuple(targets[target]))
    if error not in (0, errno.EINPROGRESS):
        return done(sock, at, target, errno.errorcode[error])
    poll.register(sock, select.EPOLLIN)
    waiting[sock.fileno()] = each = (sock, at, target)
    order.append(each)
while waiting or following < began + seconds:
    now = time.time()
    while following <= now and following < began + seconds:
        connect(number % len(targets))
        number += 1
        following += 1 / rate
    while order and (order[0][0].fileno() < 0 or order[0][1] < now - 6):
        sock, at, target = order.popleft()
        if sock.fileno() >= 0:
            del waiting[sock.fileno()]
            done(sock, at, target, "no answer")
    for descriptor, _ in poll.poll(min(max(following - time.time(), 0), 0.1)):
        sock, at, target = waiting.pop(descriptor)
        try:
            outcome = "answered" if sock.recv(16) else "empty"
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        done(sock, at, target, outcome)
print(json.dumps(found))
"""
"""Opens connections to its targets in turn, and prints for each: when it began (seconds since
1970), the number of its target, the outcome, and the time it took. It gives up after 6 seconds."""
