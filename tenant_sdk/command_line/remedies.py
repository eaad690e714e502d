"""The advice of `doctor` about a step that failed."""

from __future__ import annotations

from shared.errors import AuthenticationError, OptionText, ProtocolVersionError, SymbiosisError
from shared.secrets import Secret
from tenant_sdk.command_line.options import Target


def remedy_of(error: SymbiosisError, step: str, target: Target, advice: OptionText) -> OptionText | str:
    """What to do about a step that failed.

    Args:
        advice: the error's own, or nothing.
    """
    if isinstance(error, ProtocolVersionError):
        return "install the version of this package that the provider runs, or ask the provider to update"
    if step == "token":
        return _token_remedy(error, target.token or Secret("the token", "TOKEN"))
    url, ca = target.option("provider"), target.option("ca")
    certificate = target.option("client_certificate")
    return {
        "url": OptionText("give the URL that `symbiosis-provider serve` printed with {}", url),
        "environment": "`unset SSLKEYLOGFILE`, and delete the file that it names if it holds keys",
        "authority": OptionText(
            "look whether these files are there, and hold what they should: its ca.pem with {}, and if it "
            "asks for a client certificate, {}",
            ca,
            certificate,
        ),
        "dns": OptionText(
            "look for a typing error in {}; on a private network, ask for its DNS server or VPN", url
        ),
        "directory": OptionText(
            "compare {} with what `serve --local-dir` printed; both must run as one user", url
        ),
        "tcp": OptionText(
            "compare {} with the URL that `serve` printed; ask whether it runs, and on an address that this "
            "machine may reach (`serve --host`, firewall)",
            url,
        ),
        "tls": advice or "look into the executor's log at the time of this check",
        "client cert": OptionText("ask its operator for a client certificate, and give {}", certificate),
        "manifest": "compare the versions of both sides and the options given here",
        "transcript": "ask its operator why it does; in an audit it is meant",
        "digest": "ask its operator which weights these are before you send anything to them",
        "speed": "look into the executor's log at the time of this check",
    }[step]


def _token_remedy(error: SymbiosisError, token: Secret) -> str:
    put = f"`export {token}=...`" if token.variable else f"put it where {token} finds it"
    if isinstance(error, AuthenticationError):
        return (
            "ask its operator for a token (`symbiosis-provider token add NAME --token-file FILE`), "
            f"then {put}"
        )
    # Nobody was asked yet: it is in this user's hands.
    if token.file:
        return f"make {token.file} hold the token and nothing else, readable for you alone (`chmod 600`)"
    if token.command:
        return f"run {token} in a terminal: it must print the token, and nothing else"
    return f"{put} with the token that its operator gave you"
