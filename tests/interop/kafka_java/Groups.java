import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
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
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Does with one broker what applications do with Apache's Java client, and prints what came of each
 * step as a line; the same lines are expected of every broker and of every client.
 *
 * <p>Arguments: the broker's address, and a word that makes names its own. With a group and a topic
 * after them it is a member of that group until it is killed.
 */
public final class Groups {
    private static final long LIMIT_MS = 120_000;
    private static final int PARTITIONS = 4;
    private static final int RECORDS = 40;
    private static final int MODE_RECORDS = 10;
    private static final String RANGE = "org.apache.kafka.clients.consumer.RangeAssignor";
    private static final String COOPERATIVE =
        "org.apache.kafka.clients.consumer.CooperativeStickyAssignor";
    private static final Map<String, Map<String, String>> MODES = modes();

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
        if (arguments.length > 2) {
            groups.stay(arguments[2], arguments[3]);
            return;
        }
        groups.inEveryMode();
        groups.make();
        groups.shareAndResume("eager", RANGE);
        groups.shareAndResume("cooperative", COOPERATIVE);
        groups.killOne();
        groups.comeBack();
        groups.transact();
        groups.administrate();
        System.exit(0);
    }

    private static Map<String, Map<String, String>> modes() {
        Map<String, Map<String, String>> modes = new LinkedHashMap<>();
        modes.put("acks 0", Map.of("acks", "0", "enable.idempotence", "false"));
        modes.put("acks 1", Map.of("acks", "1", "enable.idempotence", "false"));
        modes.put("acks all", Map.of("acks", "all", "enable.idempotence", "false"));
        modes.put("idempotent", Map.of());
        for (String codec : List.of("gzip", "snappy", "lz4", "zstd")) {
            modes.put(codec, Map.of("compression.type", codec));
        }
        return modes;
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

    private void create(String name, int partitions) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.createTopics(List.of(new NewTopic(name, partitions, (short) 1))).all().get();
        }
    }

    private void make() throws Exception {
        create(topic, PARTITIONS);
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            for (int i = 0; i < RECORDS; i++) {
                producer.send(new ProducerRecord<>(topic, i % PARTITIONS, null, "r" + i));
            }
        }
    }

    /** Produces with each kind of acks and each codec, and reads it back. */
    private void inEveryMode() throws Exception {
        String modes = "java.modes." + suffix;
        create(modes, 1);
        for (Map.Entry<String, Map<String, String>> mode : MODES.entrySet()) {
            try (KafkaProducer<String, String> producer = producer(mode.getValue())) {
                for (int i = 0; i < MODE_RECORDS; i++) {
                    String key = mode.getKey() + "-" + i;
                    ProducerRecord<String, String> record =
                        new ProducerRecord<>(modes, 0, key, valueOf(key));
                    record.headers().add("h", key.getBytes(StandardCharsets.UTF_8));
                    producer.send(record);
                }
            }
        }
        Map<String, Integer> counts = new HashMap<>();
        List<ConsumerRecord<String, String>> found = new ArrayList<>();
        try (KafkaConsumer<String, String> reader = consumer("modes", Map.of())) {
            reader.assign(List.of(new TopicPartition(modes, 0)));
            await("what was produced", () -> {
                reader.poll(Duration.ofMillis(100)).forEach(found::add);
                return found.size() >= MODES.size() * MODE_RECORDS;
            });
        }
        boolean intact = true;
        for (ConsumerRecord<String, String> each : found) {
            counts.merge(each.key().split("-")[0], 1, Integer::sum);
            RecordHeader header = new RecordHeader("h", each.key().getBytes(StandardCharsets.UTF_8));
            intact &= List.of(each.headers().toArray()).equals(List.of(header));
            intact &= Objects.equals(each.value(), valueOf(each.key()));
        }
        for (String mode : MODES.keySet()) {
            tell(mode, counts.getOrDefault(mode, 0));
        }
        tell("keys, headers and nulls", intact);
    }

    /** The last of each mode has none. */
    private static String valueOf(String key) {
        return key.endsWith("-" + (MODE_RECORDS - 1)) ? null : key.repeat(20);
    }

    private KafkaProducer<String, String> transactional(String id) {
        return producer(Map.of("transactional.id", id, "transaction.timeout.ms", "600000"));
    }

    private KafkaProducer<String, String> producer(Map<String, String> more) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        settings.put("enable.idempotence", "true");
        settings.putAll(more);
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

    /** A member until it is killed; its input ends with who started it, and so does it. */
    private void stay(String group, String its) {
        Thread watch = new Thread(() -> {
            try {
                System.in.transferTo(java.io.OutputStream.nullOutputStream());
            } catch (java.io.IOException error) {
                // nobody is there any more
            }
            Runtime.getRuntime().halt(0);
        });
        watch.setDaemon(true);
        watch.start();
        try (KafkaConsumer<String, String> member =
            consumer(group, Map.of("session.timeout.ms", "2000"))) {
            member.subscribe(List.of(its));
            while (true) {
                poll(member, new TreeSet<>());
            }
        }
    }

    /** A member that is a process of its own is killed; its partitions come back. */
    private void killOne() throws Exception {
        Set<String> seen = new TreeSet<>();
        KafkaConsumer<String, String> one = consumer("kill", Map.of());
        one.subscribe(List.of(topic));
        await("the first member", () -> poll(one, seen) >= 0 && one.assignment().size() == 4);
        String java = ProcessHandle.current().info().command().orElseThrow();
        Process child = new ProcessBuilder(
            java, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx128m",
            "-cp", System.getProperty("java.class.path"), "Groups", address, suffix, "kill", topic)
            .redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.DISCARD).start();
        try {
            await("the second member", () -> poll(one, seen) >= 0 && one.assignment().size() == 2);
        } finally {
            child.destroyForcibly().waitFor();
        }
        await("those of the dead", () -> poll(one, seen) >= 0 && one.assignment().size() == 4);
        tell("after a kill", one.assignment().size());
        one.close();
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
        KafkaProducer<String, String> producer = transactional("tx." + suffix);
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
        KafkaProducer<String, String> later = transactional("tx." + suffix);
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

    /** Makes, describes and deletes a topic, and a group that was left. */
    private void administrate() throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            tell("state of the transactional id",
                admin.describeTransactions(List.of("tx." + suffix)).all()
                    .get(60, TimeUnit.SECONDS).get("tx." + suffix).state().toString());
            String made = "java.admin." + suffix;
            admin.createTopics(List.of(new NewTopic(made, 3, (short) 1)
                .configs(Map.of("retention.ms", "100000000")))).all().get(60, TimeUnit.SECONDS);
            await("the topic", () -> partitionsOf(admin, made) > 0);
            tell("partitions of a topic", partitionsOf(admin, made));
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, made);
            tell("configuration of a topic", admin.describeConfigs(List.of(resource)).all()
                .get(60, TimeUnit.SECONDS).get(resource).get("retention.ms").value());
            admin.deleteTopics(List.of(made)).all().get(60, TimeUnit.SECONDS);
            await("the end of the topic", () -> partitionsOf(admin, made) == 0);
            tell("partitions of a deleted topic", partitionsOf(admin, made));
            String name = "eager." + suffix;
            ConsumerGroupDescription found =
                admin.describeConsumerGroups(List.of(name)).all().get(60, TimeUnit.SECONDS).get(name);
            // Older and newer clients have this one in common.
            tell("state of a group that was left", found.state().toString());
            tell("offsets of it", admin.listConsumerGroupOffsets(name)
                .partitionsToOffsetAndMetadata().get(60, TimeUnit.SECONDS).size());
            tell("is it listed", isListed(admin, name));
            admin.deleteConsumerGroups(List.of(name)).all().get(60, TimeUnit.SECONDS);
            tell("is it still listed", isListed(admin, name));
        }
    }

    private static int partitionsOf(Admin admin, String name) {
        try {
            if (!admin.listTopics().names().get(60, TimeUnit.SECONDS).contains(name)) {
                return 0;
            }
            return admin.describeTopics(List.of(name)).allTopicNames()
                .get(60, TimeUnit.SECONDS).get(name).partitions().size();
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    private static boolean isListed(Admin admin, String group) throws Exception {
        return admin.listConsumerGroups().all().get(60, TimeUnit.SECONDS).stream()
            .anyMatch(each -> each.groupId().equals(group));
    }
}
