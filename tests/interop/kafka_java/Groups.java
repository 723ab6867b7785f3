import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Does with one broker what consumers in groups and transactional producers do, and prints what came
 * of each step as a line; the same lines are expected of every broker.
 *
 * <p>Arguments: the broker's address, and a word that makes names its own.
 */
public final class Groups {
    private static final long LIMIT_MS = 120_000;
    private static final int PARTITIONS = 4;
    private static final int RECORDS = 40;

    private final String address;
    private final String topic;
    private final String suffix;

    private Groups(String address, String suffix) {
        this.address = address;
        this.suffix = suffix;
        topic = "java.groups." + suffix;
    }

    public static void main(String[] arguments) throws Exception {
        Groups groups = new Groups(arguments[0], arguments[1]);
        groups.make();
        groups.shareAndResume(
            "cooperative", "org.apache.kafka.clients.consumer.CooperativeStickyAssignor");
        groups.comeBack();
        groups.transact();
        groups.describe();
        System.exit(0);
    }

    private static void tell(String step, Object value) {
        String text = value instanceof String ? "\"" + value + "\"" : String.valueOf(value);
        System.out.println("{\"event\": \"" + step + "\", \"value\": " + text + "}");
        System.out.flush();
    }

    private static void await(String what, BooleanSupplier condition) {
        long endMs = System.currentTimeMillis() + LIMIT_MS;
        while (!condition.getAsBoolean()) {
            if (System.currentTimeMillis() > endMs) {
                throw new IllegalStateException("waited in vain: " + what);
            }
        }
    }

    private void make() throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) 1))).all().get();
        }
        try (KafkaProducer<String, String> producer = producer(null)) {
            for (int i = 0; i < RECORDS; i++) {
                producer.send(new ProducerRecord<>(topic, i % PARTITIONS, null, "r" + i)).get();
            }
        }
        tell("made", RECORDS);
    }

    private KafkaProducer<String, String> producer(String transactionalId) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        settings.put("enable.idempotence", "true");
        if (transactionalId != null) {
            settings.put("transactional.id", transactionalId);
            settings.put("transaction.timeout.ms", "600000");
        }
        return new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
    }

    private KafkaConsumer<String, String> consumer(String group, Map<String, String> more) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        settings.put("group.id", group + "." + suffix);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("session.timeout.ms", "240000");
        settings.put("heartbeat.interval.ms", "200");
        settings.putAll(more);
        return new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    private static int poll(KafkaConsumer<String, String> consumer, Set<String> seen) {
        int count = 0;
        for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
            seen.add(record.value());
            count++;
        }
        return count;
    }

    private static boolean isAtEnd(KafkaConsumer<String, String> consumer) {
        return consumer.assignment().stream()
            .allMatch(each -> consumer.position(each) == RECORDS / PARTITIONS);
    }

    /** Two members share the partitions, one leaves, the rest goes on where both were. */
    private void shareAndResume(String name, String assignor) {
        Map<String, String> more = Map.of("partition.assignment.strategy", assignor);
        Set<String> seen = new TreeSet<>();
        KafkaConsumer<String, String> one = consumer(name, more);
        one.subscribe(List.of(topic));
        await("the first member", () -> poll(one, seen) >= 0 && one.assignment().size() == 4);
        KafkaConsumer<String, String> two = consumer(name, more);
        two.subscribe(List.of(topic));
        await("the second member", () -> {
            poll(one, seen);
            poll(two, seen);
            return one.assignment().size() == 2 && two.assignment().size() == 2;
        });
        Set<TopicPartition> shared = new java.util.HashSet<>(one.assignment());
        tell(name + " overlap", shared.removeAll(two.assignment()));
        await("all records", () -> {
            poll(one, seen);
            poll(two, seen);
            return isAtEnd(one) && isAtEnd(two);
        });
        tell(name + " read", seen.size());
        one.commitSync();
        two.commitSync();
        two.close();
        await("the one that is left", () -> poll(one, seen) >= 0 && one.assignment().size() == 4);
        Map<TopicPartition, OffsetAndMetadata> committed = one.committed(one.assignment());
        one.close();
        long sum = committed.values().stream().mapToLong(OffsetAndMetadata::offset).sum();
        tell(name + " committed", sum);
        KafkaConsumer<String, String> later = consumer(name, more);
        later.subscribe(List.of(topic));
        Set<String> again = new TreeSet<>();
        await("resume", () -> poll(later, again) >= 0 && later.assignment().size() == 4);
        for (int i = 0; i < 5; i++) {
            poll(later, again);
        }
        tell(name + " read again", again.size());
        later.close();
    }

    /** A static member goes away and comes back: nobody else notices. */
    private void comeBack() {
        Set<String> seen = new TreeSet<>();
        KafkaConsumer<String, String> one = consumer("static", Map.of("group.instance.id", "one"));
        one.subscribe(List.of(topic));
        KafkaConsumer<String, String> two = consumer("static", Map.of("group.instance.id", "two"));
        two.subscribe(List.of(topic));
        await("two static members", () -> {
            poll(one, seen);
            poll(two, seen);
            return one.assignment().size() == 2 && two.assignment().size() == 2;
        });
        int generation = one.groupMetadata().generationId();
        Set<TopicPartition> before = two.assignment();
        two.close();
        KafkaConsumer<String, String> back = consumer("static", Map.of("group.instance.id", "two"));
        back.subscribe(List.of(topic));
        await("the member that is back", () -> {
            poll(one, seen);
            poll(back, seen);
            return back.assignment().size() == 2;
        });
        tell("static same partitions", back.assignment().equals(before));
        tell("static same generation",
            generation == one.groupMetadata().generationId()
                && generation == back.groupMetadata().generationId());
        one.close();
        back.close();
    }

    private List<String> committedValues(String isolation) {
        Map<String, String> more = Map.of("isolation.level", isolation);
        List<String> values = new ArrayList<>();
        try (KafkaConsumer<String, String> reader = consumer("reader-" + isolation, more)) {
            List<TopicPartition> all = new ArrayList<>();
            for (int i = 0; i < PARTITIONS; i++) {
                all.add(new TopicPartition(topic, i));
            }
            reader.assign(all);
            reader.seekToBeginning(all);
            Map<TopicPartition, Long> ends = reader.endOffsets(all);
            await("the end of the topic", () -> {
                for (ConsumerRecord<String, String> record : reader.poll(Duration.ofMillis(100))) {
                    if (record.value().startsWith("t")) {
                        values.add(record.value());
                    }
                }
                return ends.entrySet().stream()
                    .allMatch(each -> reader.position(each.getKey()) >= each.getValue());
            });
        }
        values.sort(null);
        return values;
    }

    private static String text(List<String> values) {
        return String.join(" ", values);
    }

    /** Commits, rolls back, commits offsets with records, and is shut out by its successor. */
    private void transact() throws Exception {
        KafkaProducer<String, String> producer = producer("tx." + suffix);
        producer.initTransactions();
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, 0, null, "t1"));
        producer.send(new ProducerRecord<>(topic, 1, null, "t2"));
        producer.commitTransaction();
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, 0, null, "t3-gone")).get();
        producer.abortTransaction();
        producer.beginTransaction();
        producer.abortTransaction();
        KafkaConsumer<String, String> group = consumer("with-tx", Map.of());
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, 2, null, "t4"));
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        offsets.put(new TopicPartition(topic, 0), new OffsetAndMetadata(7, "with t4"));
        producer.sendOffsetsToTransaction(offsets, group.groupMetadata());
        producer.commitTransaction();
        producer.beginTransaction();
        offsets.put(new TopicPartition(topic, 0), new OffsetAndMetadata(9, "never"));
        producer.sendOffsetsToTransaction(offsets, group.groupMetadata());
        producer.abortTransaction();
        OffsetAndMetadata found =
            group.committed(Set.of(new TopicPartition(topic, 0))).values().iterator().next();
        tell("offset of the transaction", found.offset());
        tell("text of the transaction", found.metadata());
        group.close();
        tell("read committed", text(committedValues("read_committed")));
        tell("read uncommitted", text(committedValues("read_uncommitted")));
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, 3, null, "t5-open")).get();
        tell("while one is open", text(committedValues("read_committed")));
        KafkaProducer<String, String> later = producer("tx." + suffix);
        later.initTransactions();
        try {
            producer.send(new ProducerRecord<>(topic, 3, null, "t6-late"));
            producer.commitTransaction();
            tell("shut out", "no");
        } catch (ProducerFencedException fenced) {
            tell("shut out", "fenced");
        } catch (Exception other) {
            tell("shut out", other.getClass().getSimpleName());
        }
        producer.close(Duration.ZERO);
        later.beginTransaction();
        later.send(new ProducerRecord<>(topic, 3, null, "t7"));
        later.commitTransaction();
        later.close();
        tell("in the end", text(committedValues("read_committed")));
    }

    private void describe() throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            String name = "cooperative." + suffix;
            ConsumerGroupDescription found =
                admin.describeConsumerGroups(List.of(name)).all().get(60, TimeUnit.SECONDS).get(name);
            tell("state of a group that was left", found.groupState().toString());
            tell("offsets of it", admin.listConsumerGroupOffsets(name)
                .partitionsToOffsetAndMetadata().get(60, TimeUnit.SECONDS).size());
            admin.deleteConsumerGroups(List.of(name)).all().get(60, TimeUnit.SECONDS);
            tell("is it still listed", admin.listGroups().all().get(60, TimeUnit.SECONDS).stream()
                .anyMatch(each -> each.groupId().equals(name)));
            tell("state of the transactional id",
                admin.describeTransactions(List.of("tx." + suffix)).all()
                    .get(60, TimeUnit.SECONDS).get("tx." + suffix).state().toString());
        }
    }
}
