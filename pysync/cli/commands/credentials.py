"""The arguments, help and examples of the commands of keys, certificates and keyrings."""

from pysync.cli.parser import Parser, add_client, add_issuer, add_server, add_trust, server_url


def add_keys(keys: Parser) -> None:
    """Add the commands of `keys`."""
    new = keys.add_command(
        "new",
        "create keys, at random or from a passphrase",
        "credentials.new_key",
        example="pysync keys new --out me.json",
    )
    new.add_flag("--passphrase-stdin", "read a passphrase from standard input")
    new.add_value("--out", "FILE", "write the keys to this file, readable by you alone (default: print)")
    show = keys.add_command(
        "show",
        "print the public keys, which you may give to others",
        "credentials.show_key",
        example="pysync keys show me.json > me.pub",
    )
    show.add_value("file", "FILE", "a key file")


def add_certificates(certificates: Parser) -> None:
    """Add the commands of `cap`."""
    device = certificates.add_command(
        "device",
        "issue a certificate for another device of yours; without --to: for the key itself",
        "credentials.device",
        example="pysync cap device --key me.json --to laptop.pub --out laptop.cap",
    )
    device.add_value("--to", "FILE", "the device's keys, as `keys show` prints them")
    device.add_value("--collection", "NAME", "grant cap:OP:NAME roles (default: *)", action="append")

    member = certificates.add_command(
        "member",
        "issue a certificate for another person, for one collection",
        "credentials.member",
        example="pysync cap member notes --key me.json --to bob.pub --write --out bob.cap",
    )
    member.add_value("collection", "COLLECTION", "name of the collection")
    member.add_value("--to", "FILE", "their keys, as `keys show` prints them", required=True)

    audience = certificates.add_command(
        "audience",
        "issue a certificate for anyone who presents it, for one collection",
        "credentials.audience",
        example="pysync cap audience notes --key me.json --link",
    )
    audience.add_value("collection", "COLLECTION", "name of the collection")
    audience.add_value("--aud", "KEY", "only for this key (64 hex digits)", action="append")
    audience.add_flag("--link", "print the fragment of a public link")

    for command in (member, audience):
        command.add_flag("--write", "also allow writes (default: read, list)")
    for command in (device, member, audience):
        add_issuer(command)
        command.add_argument("--days", type=int, default=30, help="days until it expires (default: 30)")
        command.add_argument(
            "--op", action="append", choices=("read", "list", "write"), help="allowed operation; repeatable"
        )
        command.add_value("--path", "GLOB", "allowed paths; !GLOB denies; repeatable", action="append")
        command.add_value("--out", "FILE", "write the certificate here (default: print)")

    show = certificates.add_command(
        "show",
        "print a certificate and whether it is valid",
        "credentials.show_certificate",
        example="pysync cap show bob.cap --server https://sync.example.com",
    )
    show.add_value("file", "FILE", "JSON or an Authorization header; - is standard input")
    show.add_value("--server", "URL", "ask this server whether the certificate is revoked", type=server_url)

    revoke = certificates.add_command(
        "revoke",
        "revoke certificates and keys: print the signed revocation list; --publish sends it",
        "credentials.revoke",
        description="Signs a revocation list and prints it. With --publish the list keeps the entries of "
        "the one that the server has, and replaces it.",
        example="pysync cap revoke bob.cap --key me.json --publish",
    )
    revoke.add_value("file", "FILE", "certificates to revoke", nargs="*")
    revoke.add_value(
        "--subject",
        "FILE",
        "revoke all certificates that the issuer gave to the key in FILE (as of `keys show`)",
        action="append",
        default=[],
    )
    add_issuer(revoke)
    revoke.add_value(
        "--generation",
        "N",
        "number of the list, larger than that of the one it replaces (with --publish: the next)",
        type=int,
    )
    revoke.add_flag(
        "--replace", "with --publish: drop the entries of the published list, so that they are valid again"
    )
    revoke.add_flag("--publish", "also send the list to the server")
    add_server(revoke)


def add_keyrings(keyrings: Parser) -> None:
    """Add the commands of `keyring`."""
    for action, help_text, recipients, example in (
        ("new", "create a keyring for your key and others", "*", "teams/t1 bob.pub"),
        ("add", "let someone read sealed data, also what was sealed before", 1, "teams/t1 carol.pub"),
        ("remove", "remove someone: later data is sealed under a new key", 1, "teams/t1 bob.pub"),
        ("show", "print the recipients of a keyring, and whether you can open it", None, "teams/t1"),
    ):
        command = keyrings.add_command(
            action,
            help_text,
            "credentials.keyring",
            example=f"pysync keyring {action} {example} --key me.json",
        )
        command.set_defaults(action=action, recipient=[])
        command.add_value("name", "NAME", "path before /_keyring")
        if recipients is not None:
            command.add_value("recipient", "FILE", "their keys, as `keys show` prints them", nargs=recipients)
        add_trust(command)
        add_client(command)
