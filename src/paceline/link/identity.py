"""Who a rank is to the others of its link: a key that never leaves its memory, and a certificate that they are told.

Certificates are told at the meeting, which only members can join or change; nobody else vouches for them, and nothing
but their own bytes counts: neither names nor dates. A key lives as long as its link, and is never written to a disk.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import secrets
import ssl
from collections.abc import Sequence

NEEDS = "cryptography"
BEGIN, NEVER = datetime.datetime(1970, 1, 2), datetime.datetime(9999, 12, 31, 23, 59, 59)  # clocks may be wrong


def check() -> None:
    """Raises ValueError where nothing can be encrypted here."""
    if importlib.util.find_spec(NEEDS) is None:
        raise ValueError(
            f"encryption needs the package {NEEDS}, which is not installed here; pip install 'paceline[encrypt]' on "
            f"every node, or leave --encrypt (PACELINE_ENCRYPT) out"
        )


class Identity:
    """``certificate``: what the others are told, in DER."""

    def __init__(self) -> None:
        check()
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        # OpenSSL looks for who vouches for a certificate by name: each has its own, and vouches for itself
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, secrets.token_hex(16))])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(BEGIN)
            .not_valid_after(NEVER)
            .sign(key, hashes.SHA256())
        )
        self.certificate = made.public_bytes(serialization.Encoding.DER)
        self._both = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + made.public_bytes(serialization.Encoding.PEM)

    def context(self, server: bool, certificates: Sequence[bytes]) -> ssl.SSLContext:
        """TLS 1.3 with whoever has one of these certificates, and its key; with nobody else, on either side."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(certificates))
        if server:
            context.num_tickets = 0  # nothing may be said on a line that only one side writes
        memory = os.memfd_create("paceline")  # Python takes keys from files alone: this one is on no disk
        try:
            os.write(memory, self._both)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context
