"""Commands of a federation: `fedgrad node` for a site, `fedgrad federation` for its operator."""

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from fedgrad.core.errors import ArgumentError, FederatedError

NODE = """\
Serve this site's data to federated programs, as its policy allows. Runs until it is stopped.

DATA is module:function (the current folder is searched too); the function gets a context, whose
`config` holds what --config says, and returns a tree of arrays. Without --policy every program is
refused. On another machine than the SuperLink's, give its root certificates and this node's key.

  fedgrad node --superlink fl.example.org:8000 --data clinic:patients --policy policy.toml \\
      --root-certificates authority.crt --key node-0
"""
FEDERATION = """\
Run a federation on this machine for trying out, and prepare a real one.

  fedgrad federation up --nodes 3 --data examples.federation.sites:data
  fedgrad federation status
  fedgrad federation down
  fedgrad federation certificates keys --host fl.example.org --nodes 5
  fedgrad federation register keys/node-0.pub --superlink fl.example.org:8000 \\
      --root-certificates keys/authority.crt
"""
_FOLDER = ".fedgrad-federation"


def add_commands(subparsers: Any) -> None:
    """Add `node` and `federation`; each sets `run`, a function from the options to an exit code."""
    node = _parser(subparsers, "node", "serve a site's data to federated programs", NODE)
    _add_superlink(node)
    node.add_argument("--data", required=True, metavar="MODULE:FUNCTION")
    node.add_argument("--policy", metavar="FILE", help="what is allowed here (TOML)")
    node.add_argument("--key", metavar="FILE", help="this node's private key")
    node.add_argument("--config", action="append", default=[], metavar="NAME=VALUE")
    node.add_argument(
        "--memory-seconds", type=float, default=600.0, help="how long values are kept"
    )
    node.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for a SuperLink"
    )
    node.set_defaults(run=_node)

    federation = _parser(subparsers, "federation", "run or prepare a federation", FEDERATION)
    actions = federation.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("up", help="start a SuperLink and nodes on this machine")
    action.add_argument("--nodes", type=int, default=3)
    action.add_argument("--data", required=True, metavar="MODULE:FUNCTION")
    action.add_argument(
        "--policy", metavar="FILE", help="of the nodes; without one, all is allowed"
    )
    action.add_argument("--secure", action="store_true", help="TLS, node keys and a secret")
    action.add_argument("--stock", action="store_true", help="Flower's own nodes, for flwr run")
    action.add_argument("--port", type=int)
    action.add_argument("--config", action="append", default=[], metavar="NAME=VALUE")
    action.set_defaults(run=_up)
    for name, run, text in (
        ("down", _down, "end what `up` started, and nothing else"),
        ("status", _status, "what of it runs"),
    ):
        action = actions.add_parser(name, help=text)
        action.set_defaults(run=run)
    for name in ("up", "down", "status"):
        actions.choices[name].add_argument("--folder", default=_FOLDER, help="logs, keys, state")
    action = actions.add_parser("certificates", help="an authority, certificates and node keys")
    action.add_argument("folder")
    action.add_argument("--host", action="append", help="name or address of the SuperLink")
    action.add_argument("--nodes", type=int, default=1)
    action.add_argument("--days", type=int, default=365)
    action.set_defaults(run=_certificates)
    action = actions.add_parser("register", help="let the holder of a key take part")
    action.add_argument("key", help="public key of the node (KEY.pub)")
    _add_superlink(action)
    action.set_defaults(run=_register)


def _parser(subparsers: Any, name: str, text: str, description: str) -> Any:
    raw = argparse.RawDescriptionHelpFormatter
    return subparsers.add_parser(name, help=text, description=description, formatter_class=raw)


def _add_superlink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--root-certificates", metavar="FILE", help="of the SuperLink's authority")
    parser.add_argument("--insecure", action="store_true", help="no TLS, not even elsewhere")


def _node(options: argparse.Namespace) -> int:
    from fedgrad.federation.flower.connection import is_loopback, secured
    from fedgrad.federation.flower.fleet import serve, warm
    from fedgrad.federation.protocol.node import Node
    from fedgrad.federation.protocol.node_data import Context, load
    from fedgrad.federation.protocol.policy import Policy

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for chatty in ("httpx", "jax"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    connection = secured(options.superlink, options.root_certificates, insecure=options.insecure)
    elsewhere = not is_loopback(options.superlink.rpartition(":")[0])
    if elsewhere and options.key is None and not options.insecure:
        raise ArgumentError(
            "A node proves who it is to a SuperLink on another machine: give --key. "
            "(fedgrad federation certificates makes keys.)"
        )
    log = logging.getLogger("fedgrad.node")
    if elsewhere and connection.plaintext:
        log.warning("Everything this node sends and receives can be read and changed on the way.")
    policy = Policy() if options.policy is None else Policy.read(options.policy)
    if options.policy is None:
        log.warning("No --policy: every program will be refused.")
    node = Node(
        load(options.data),
        policy,
        options.memory_seconds,
        context=Context(dict(_setting(item) for item in options.config)),
    )
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    warm(node)
    serve(node, connection, options.key, over, options.patience)
    return 0


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ArgumentError(f"A setting is NAME=VALUE, got {text!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _up(options: argparse.Namespace) -> int:
    from fedgrad.federation.operate.local_federation import up

    federation = up(
        options.folder,
        options.data,
        options.nodes,
        policy=options.policy,
        secure=options.secure,
        stock=options.stock,
        port=options.port,
        config=options.config,
    )
    print(f"{options.nodes} nodes at {federation.address}; logs in {federation.folder}")
    if not options.stock:
        named = [f"{name}={value!r}" for name, value in federation.credentials.items()]
        print(f"fg.executors.flower({', '.join([repr(federation.address), *named])})")
    return 0


def _down(options: argparse.Namespace) -> int:
    from fedgrad.federation.operate.local_federation import down

    print(f"{down(options.folder)} processes ended")
    return 0


def _status(options: argparse.Namespace) -> int:
    from fedgrad.federation.operate.local_federation import read

    federation = read(options.folder)
    if federation is None:
        print("no federation here")
        return 1
    print(f"SuperLink at {federation.address}{', secure' if federation.secure else ''}")
    for process in federation.processes:
        print(f"{process.role:10} {process.pid:8} {'runs' if process.alive else 'has ended'}")
    return 0 if all(process.alive for process in federation.processes) else 1


def _certificates(options: argparse.Namespace) -> int:
    from fedgrad.federation.operate.certificates import make_certificates

    hosts = options.host or ["localhost", "127.0.0.1", "::1"]
    folder = make_certificates(options.folder, hosts, options.nodes, options.days)
    for path in sorted(folder.iterdir()):
        print(path)
    return 0


def _register(options: argparse.Namespace) -> int:
    from fedgrad.federation.flower.connection import secured
    from fedgrad.federation.flower.control_api import register
    from fedgrad.federation.flower.keys import public_key

    connection = secured(options.superlink, options.root_certificates, insecure=options.insecure)
    print(f"node {register(connection, public_key(options.key))} may take part")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run these commands alone; this is how the nodes of a local federation are started."""
    parser = argparse.ArgumentParser(prog="fedgrad")
    add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except ArgumentError as error:
        print(f"fedgrad: {error}", file=sys.stderr)
        return 2
    except FederatedError as error:
        print(f"fedgrad: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
