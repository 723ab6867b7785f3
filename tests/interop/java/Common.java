import org.apache.rocketmq.client.ClientConfig;

/** What all clients of these programs are told. */
final class Common {
    private static final int INTERVAL_MS = 1_000;

    private Common() {
    }

    /**
     * Routes are asked for and heartbeats sent every second instead of every 30 s: a nameserver that
     * is gone or a broker that has started again is noticed within a test's time.
     */
    static <T extends ClientConfig> T told(T client, Options options) {
        client.setNamesrvAddr(options.one("namesrv"));
        client.setPollNameServerInterval(INTERVAL_MS);
        client.setHeartbeatBrokerInterval(INTERVAL_MS);
        return client;
    }
}
