"""This module looks at brokers and nameservers and changes their settings."""

from __future__ import annotations

from sluice.client.administration.everywhere import Outcomes, each, settled
from sluice.client.administration.messages import MessageDesk
from sluice.client.administration.values import BrokerStatus, WritePermissionSet
from sluice.errors import SluiceError


class BrokerDesk(MessageDesk):
    """Brokers and nameservers of a cluster."""

    async def replicas(self, broker: str | None, cluster: str | None) -> list[str]:
        """The address that was named, or all replicas of all brokers of a cluster."""
        if broker is not None:
            return [broker]
        brokers = await self.brokers(cluster)
        return [one.addresses[number] for one in brokers for number in sorted(one.addresses)]

    async def broker_statuses(self, cluster: str | None = None) -> list[BrokerStatus]:
        """Every replica with its state; where it does not answer, with the reason."""
        result = []
        for broker in sorted(await self.brokers(cluster), key=lambda one: (one.cluster, one.name)):
            for number in sorted(broker.addresses):
                place = (broker.cluster, broker.name, number, broker.addresses[number])
                try:
                    runtime = await self.runtime_info(broker.addresses[number])
                    result.append(BrokerStatus(*place, runtime))
                except SluiceError as error:
                    result.append(BrokerStatus(*place, error=str(error)))
        return result

    async def set_broker_config(
        self,
        name: str,
        value: str,
        *,
        broker: str | None = None,
        cluster: str | None = None,
        replicas: bool = False,
    ) -> Outcomes:
        """Change one setting of running brokers, by RocketMQ's name; of masters, or of all."""
        if replicas:
            addresses = await self.replicas(broker, cluster)
        else:
            addresses = await self.places(broker, cluster)
        outcomes = await each(
            addresses, lambda address: self.put_broker_setting(address, name, value)
        )
        return settled(outcomes, outcomes)

    async def set_write_permission(self, broker_name: str, allowed: bool) -> WritePermissionSet:
        """Take a broker out of sending, or back into it, at every nameserver."""
        await self.broker_named(broker_name)  # nameservers say nothing of an unknown one
        change = self.add_write_permission if allowed else self.wipe_write_permission
        counts: dict[str, int] = {}

        async def one(nameserver: str) -> None:
            counts[nameserver] = await change(nameserver, broker_name)

        outcomes = await each(self.nameservers, one)
        return settled(WritePermissionSet(broker_name, counts, outcomes), outcomes)

    async def set_value(self, namespace: str, key: str, value: str) -> Outcomes:
        """Set a value that the nameservers keep."""
        outcomes = await each(
            self.nameservers, lambda address: self.put_value(address, namespace, key, value)
        )
        return settled(outcomes, outcomes)

    async def delete_value(self, namespace: str, key: str) -> Outcomes:
        """Delete a value that the nameservers keep, whether it is there or not."""
        outcomes = await each(
            self.nameservers, lambda address: self.remove_value(address, namespace, key)
        )
        return settled(outcomes, outcomes)
