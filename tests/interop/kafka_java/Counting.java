import java.time.Duration;
import java.util.Arrays;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;

/**
 * Counts words with Kafka Streams, exactly once: the words of one topic go through a topic of its
 * own to a store, and each new count to another topic. It runs until it is stopped or killed.
 *
 * <p>Arguments: the broker's address, the topics that it reads and writes, and a directory for its
 * store.
 */
public final class Counting {
    private static final Duration LIMIT = Duration.ofSeconds(60);

    public static void main(String[] arguments) throws InterruptedException {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, arguments[3]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, "counting");
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        // Each count is written, and soon, while its transaction goes on.
        settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0);
        settings.put(StreamsConfig.producerPrefix("linger.ms"), 0);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 1_000);
        // Who was killed is missed soon.
        settings.put(StreamsConfig.consumerPrefix("session.timeout.ms"), 6_000);
        settings.put(StreamsConfig.consumerPrefix("heartbeat.interval.ms"), 500);

        StreamsBuilder topology = new StreamsBuilder();
        KStream<String, String> lines = topology.stream(arguments[1]);
        lines.flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word, Grouped.as("words"))
            .count(Materialized.as("counts"))
            .toStream()
            .mapValues(String::valueOf)
            .to(arguments[2]);

        KafkaStreams streams = new KafkaStreams(topology.build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            if (streams.close(LIMIT) && streams.state() == KafkaStreams.State.NOT_RUNNING) {
                System.out.println("{\"event\":\"done\"}");
            }
        }));
        streams.start();
        new CountDownLatch(1).await();
    }

    private Counting() {
    }
}
