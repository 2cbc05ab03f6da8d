import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Map;

public class Service {
    static final long FEE = 150;
    static final long OVERDRAFT = 2000;

    record Booking(String giver, String taker, long amount, long fee) {}

    private final Map<String, Long> balances = new HashMap<>();
    private final ArrayDeque<Booking> done = new ArrayDeque<>();
    private long fees = 0;

    private void apply(Booking one, long sign) {
        if (one.giver() != null) balances.merge(one.giver(), -sign * (one.amount() + one.fee()), Long::sum);
        balances.merge(one.taker(), sign * one.amount(), Long::sum);
        fees += sign * one.fee();
    }

    private void book(Booking one) {
        apply(one, 1);
        done.push(one);
    }

    public String answer(String[] command) {
        String name = command.length == 0 ? "" : command[0];
        return switch (name + " " + command.length) {
            case "open 2" -> balances.putIfAbsent(command[1], 0L) == null ? "ok" : "error exists";
            case "deposit 3" -> {
                long amount = Long.parseLong(command[2]);
                if (amount <= 0) yield "error amount";
                if (!balances.containsKey(command[1])) yield "error unknown";
                book(new Booking(null, command[1], amount, 0));
                yield "ok " + balances.get(command[1]);
            }
            case "transfer 4" -> {
                long amount = Long.parseLong(command[3]);
                if (amount <= 0) yield "error amount";
                if (!balances.containsKey(command[1]) || !balances.containsKey(command[2])) yield "error unknown";
                if (command[1].equals(command[2])) yield "error same";
                long fee = (amount * FEE + 9999) / 10000;
                if (balances.get(command[1]) - amount - fee < -OVERDRAFT) yield "error funds";
                book(new Booking(command[1], command[2], amount, fee));
                yield "ok " + fee;
            }
            case "balance 2" -> balances.containsKey(command[1]) ? "" + balances.get(command[1]) : "error unknown";
            case "undo 1" -> {
                if (done.isEmpty()) yield "error nothing";
                apply(done.pop(), -1);
                yield "ok";
            }
            case "total 1" -> balances.values().stream().mapToLong(Long::longValue).sum() + " " + fees;
            default -> "error command";
        };
    }
}
