// Bookkeeping kernels. One work item handles one request, unless a comment says otherwise.
// Strides are in elements, widths in bytes.

static void copy_bytes(global uchar *to, global const uchar *from, long width) {
    for (long i = 0; i < width; i++)
        to[i] = from[i];
}

kernel void gather_rows(global const uchar *state, global const long *rows, global uchar *out, long width) {
    long b = get_global_id(0);
    copy_bytes(out + b * width, state + rows[b] * width, width);
}

// Row 0 is reserved: values for row 0 come from padding.
kernel void scatter_rows(global uchar *state, global const long *rows, global const uchar *values, long width) {
    long b = get_global_id(0);
    if (rows[b] > 0)
        copy_bytes(state + rows[b] * width, values + b * width, width);
}

// One work item copies one row; `out` may be columns of a wider tensor.
kernel void copy_rows(global const uchar *source, global uchar *out, long width, long pitch_in, long pitch_out) {
    long t = get_global_id(0);
    copy_bytes(out + t * pitch_out, source + t * pitch_in, width);
}

kernel void gather_requests(
    global const long *rows, global const long *lens, long lens_by_row,
    global const long *last_tokens, global const long *seeds, global const float *temperature, global const int *tables,
    global long *own_rows, global long *own_lens,
    global long *own_last_tokens, global long *own_seeds, global float *own_temperature, global int *own_tables,
    global long *found, long pages, long findings, long found_stride) {
    long b = get_global_id(0), row = rows[b];
    own_rows[b] = row;
    own_lens[b] = lens[lens_by_row ? row : b];
    own_last_tokens[b] = last_tokens[row];
    own_seeds[b] = seeds[row];
    own_temperature[b] = temperature[row];
    for (long p = 0; p < pages; p++)
        own_tables[b * pages + p] = tables[row * pages + p];
    for (long f = 0; f < findings; f++)
        found[b * found_stride + f] = -1;
}

kernel void place_tokens(
    global const long *lens, global const int *tables, long page_size, long last,
    global long *positions, global long *slots, global int *seq_lens, long pages, long count, long ends,
    long position_row, long position_column, long slot_row, long slot_column, long end_row, long end_column) {
    long b = get_global_id(0);
    for (long i = 0; i < count; i++) {
        long at = lens[b] + i, page = at / page_size;
        long first = page < pages ? (long)tables[b * pages + page] : 0;
        slots[b * slot_row + i * slot_column] = first * page_size + at % page_size;
        positions[b * position_row + i * position_column] = min(at, last);
        if (i >= count - ends)
            seq_lens[b * end_row + (i - count + ends) * end_column] = (int)min(at + 1, pages * page_size);
    }
}

kernel void publish_accepted(
    global const long *rows, global const long *lens, global const long *tokens, global const long *accepted,
    global long *lengths, global long *last_tokens, global long *results, global long *own_tokens,
    global long *own_accepted, global long *pending, long has_pending, long path, long result_stride) {
    long b = get_global_id(0), row = rows[b], count = accepted[b];
    if (has_pending)
        pending[row] = row <= 0 ? 0 : pending[row] > 0 ? -1 - count : count + 1;
    lengths[row] = row > 0 ? lens[b] + count + 1 : 0;
    last_tokens[row] = row > 0 ? tokens[b * path + count] : 0;
    results[b * result_stride] = count;
    own_accepted[b] = count;
    for (long e = 0; e < path; e++) {
        results[b * result_stride + 1 + e] = tokens[b * path + e];
        own_tokens[b * path + e] = tokens[b * path + e];
    }
}

kernel void place_accepted(
    global const long *lens, global const long *tokens, global const long *accepted,
    global long *following, global long *last, global long *positions, long path) {
    long b = get_global_id(0);
    for (long e = 0; e < path; e++)
        following[b * path + e] = max(tokens[b * path + e], 0L);
    last[b] = b * path + accepted[b];
    positions[b] = lens[b] + accepted[b] + 2;
}

// Greedy acceptance: drafts are accepted while they equal the argmax, the lowest index among equals.
kernel void verify_chain(
    global const float *logits, global const long *drafts, global long *tokens, global long *accepted,
    long drafted, long vocabulary) {
    long b = get_global_id(0), count = 0;
    global const float *row = logits + b * (drafted + 1) * vocabulary;
    for (long e = 0; e <= drafted; e++)
        tokens[b * (drafted + 1) + e] = -1;
    for (;; count++, row += vocabulary) {
        long best = 0;
        for (long v = 1; v < vocabulary; v++)
            if (row[v] > row[best])
                best = v;
        tokens[b * (drafted + 1) + count] = best;
        if (count == drafted || drafts[b * drafted + count] != best)
            break;
    }
    accepted[b] = count;
}

// Takes about `cycles` clocks: a chain of multiplications of about four clocks each.
kernel void spin(global ulong *out, long cycles) {
    ulong x = 1;
    for (long i = 0; i < cycles / 4; i++)
        x = x * 6364136223846793005UL + 1442695040888963407UL;
    out[0] = x;
}
