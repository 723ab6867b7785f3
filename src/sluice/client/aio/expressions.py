"""This module has a broker look at an SQL expression, before nothing comes and nobody knows why."""

from __future__ import annotations

import orjson

from sluice.client.aio.session import Session
from sluice.protocol.remoting_clients import SQL92, Subscription
from sluice.protocol.remoting_codes import RequestCode as Request


async def check_expression(session: Session, group: str, subscription: Subscription) -> None:
    """Raises what the broker says; tags need no broker."""
    if subscription.expression_type != SQL92:
        return
    body = {
        "clientId": session.client_id,
        "group": group,
        "subscriptionData": subscription.members(),
    }
    for address in session.broker_addresses[:1]:
        what = f"the expression {subscription.expression!r} on {subscription.topic}"
        data = orjson.dumps(body)
        await session.done(address, Request.CHECK_CLIENT_CONFIG, body=data, what=what)
